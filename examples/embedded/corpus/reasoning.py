"""Short word problems with worked solutions.

The wording of a solution follows from the question, so what is left to decide is mostly the
numbers: entropy is low in the words and high at each computed number. Numbers stay small
(operands up to 9 in first sums, products up to 20 if more steps follow; division undoes a
product), so that there are few distinct sums: a model of a million parameters must be able to
learn each of them twice, as the next token and as a masked one, and sees a masked result with
both operands visible in only one of twelve cases.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from examples.embedded.corpus.problems import PROBLEMS, Problem
from examples.embedded.corpus.words import CONTAINERS, NAMES, THINGS

MARKER = "Answer: "

Numbers = Sequence[int]
"""The numbers that a question gives, for the slots a, b, c and d."""


def _small(rng: random.Random, count: int, most: int = 9) -> list[int]:
    return [rng.randint(2, most) for _ in range(count)]


def _small_factors(rng: random.Random) -> tuple[int, int]:
    """Draws two factors whose product is at most 20."""
    a = rng.randint(2, 9)
    return a, rng.randint(2, min(9, 20 // a))


def _plus_minus(rng: random.Random) -> Numbers:
    a, b = _small(rng, 2)
    return a, b, rng.randint(2, min(9, a + b - 2))


def _minus_minus(rng: random.Random) -> Numbers:
    b, c, left = _small(rng, 3, most=6)
    return b + c + left, b, c


def _times_minus(rng: random.Random) -> Numbers:
    a, b = _small_factors(rng)
    return a, b, rng.randint(2, min(9, a * b - 2))


def _minus_times(rng: random.Random) -> Numbers:
    """Draws a round c, as in paying or in a journey."""
    a, b = _small_factors(rng)
    return a, b, 10 * rng.randint((a * b + 2 + 9) // 10, 3)


def _plus_times(rng: random.Random) -> Numbers:
    total, c = rng.randint(4, 9), rng.randint(2, 9)
    a = rng.randint(2, total - 2)
    return a, total - a, c


def _divide_plus(rng: random.Random) -> Numbers:
    b, share, c = _small(rng, 3)
    return b * share, b, c


def _divide_times(rng: random.Random) -> Numbers:
    b, rate, c = _small(rng, 3)
    return b * rate, b, c if c != b else c + 1


def _plus_divide(rng: random.Random) -> Numbers:
    c = rng.randint(2, 4)
    total = c * rng.randint(3, 18 // c)
    a = rng.randint(max(2, total - 9), min(9, total - 2))
    return a, total - a, c


def _average_of_two(rng: random.Random) -> Numbers:
    mean = rng.randint(4, 9)
    gap = rng.randint(1, min(mean - 2, 5))
    return rng.choice(((mean - gap, mean + gap), (mean + gap, mean - gap)))


def _average_of_three(rng: random.Random) -> Numbers:
    mean = rng.randint(5, 9)
    a, b = rng.randint(mean - 3, mean + 2), rng.randint(mean - 2, mean + 3)
    return a, b, 3 * mean - a - b


def _minus_divide(rng: random.Random) -> Numbers:
    c, share = _small_factors(rng)
    b = rng.randint(2, 9)
    return c * share + b, b, c


def _fewer_total(rng: random.Random) -> Numbers:
    b, fewer = _small(rng, 2)
    return fewer + b, b


def _times_times(rng: random.Random) -> Numbers:
    a, c = rng.randint(2, 4), rng.randint(2, 9)
    return a, rng.randint(2, 9 // a), c


NUMBERS: Mapping[str, Callable[[random.Random], Numbers]] = MappingProxyType(
    {
        "plus_minus": _plus_minus,
        "plus_plus": lambda rng: _small(rng, 3),
        "minus_minus": _minus_minus,
        "times_plus": lambda rng: (*_small_factors(rng), rng.randint(2, 9)),
        "times_minus": _times_minus,
        "minus_times": _minus_times,
        "plus_times": _plus_times,
        "rectangle": lambda rng: sorted(_small(rng, 2), reverse=True),
        "divide_plus": _divide_plus,
        "divide_times": _divide_times,
        "plus_divide": _plus_divide,
        "average_of_two": _average_of_two,
        "average_of_three": _average_of_three,
        "minus_divide": _minus_divide,
        "two_products": lambda rng: _small(rng, 4, most=4),
        "more_total": lambda rng: _small(rng, 2),
        "fewer_total": _fewer_total,
        "fold_total": _small_factors,
        "times_times": _times_times,
        "steps_up": lambda rng: (rng.randint(2, 9), rng.randint(2, 6)),
    }
)
"""Ways to draw the numbers of a question, each named after the steps of its solution."""

_STEP = re.compile(r"(\S+) ([-+x/]) (\S+) = \{(\w)\}")
_APPLY = {"+": operator.add, "-": operator.sub, "x": operator.mul, "/": operator.floordiv}


def _solved(solution: str, given: Numbers) -> dict[str, int]:
    """Returns a problem's numbers by name: the given ones, then those that its solution computes.
    The last is the result."""
    numbers = dict(zip("abcd", given, strict=False))
    for left, sign, right, name in _STEP.findall(solution):
        operands = (int(one.format_map(numbers)) for one in (left, right))
        numbers[name] = _APPLY[sign](*operands)
    return numbers


def draw(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Draws a question of one form and its solution, a step per line, then the marked answer."""
    n, m = rng.sample(NAMES, 2)
    x, y = rng.sample(THINGS, 2)
    box, boxes = rng.choice(CONTAINERS)
    numbers = _solved(problem.solution, NUMBERS[problem.numbers](rng))
    slots = {"n": n, "m": m, "x": x, "y": y, "box": box, "boxes": boxes, **numbers}
    question = rng.choice(problem.questions).format_map(slots)
    steps = problem.solution.format_map(slots)
    return question, f"{steps}\n{MARKER}{[*numbers.values()][-1]}"


KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {problem.kind: partial(draw, problem) for problem in PROBLEMS}
)
