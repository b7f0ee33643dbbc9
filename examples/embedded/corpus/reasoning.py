"""Short word problems with worked solutions.

The wording of a solution follows from the question, so what is left to decide is mostly the
numbers: entropy is low in the words and high at each computed number. Numbers stay small
(operands up to 9 in first sums, products up to 20 if more steps follow; division undoes a
product), so that there are few distinct sums: a model of a million parameters must be able to
learn each of them twice, as the next token and as a masked one, and sees a masked result with
both operands visible in only one of twelve cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from examples.embedded.corpus.problems import PROBLEMS, Problem
from examples.embedded.corpus.words import CONTAINERS, NAMES, THINGS

MARKER = "Answer: "

Numbers = dict[str, int]


def _small_factors(rng: random.Random) -> tuple[int, int]:
    """Draws two factors whose product is at most 20."""
    a = rng.randint(2, 9)
    return a, rng.randint(2, min(9, 20 // a))


def _plus_minus(rng: random.Random) -> Numbers:
    """a + b = s, s - c = t"""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    c = rng.randint(2, min(9, a + b - 2))
    return {"a": a, "b": b, "c": c, "s": a + b, "t": a + b - c}


def _plus_plus(rng: random.Random) -> Numbers:
    """a + b = s, s + c = t"""
    a, b, c = (rng.randint(2, 9) for _ in range(3))
    return {"a": a, "b": b, "c": c, "s": a + b, "t": a + b + c}


def _minus_minus(rng: random.Random) -> Numbers:
    """a - b = s, s - c = t"""
    b, c, t = (rng.randint(2, 6) for _ in range(3))
    return {"a": b + c + t, "b": b, "c": c, "s": c + t, "t": t}


def _times_plus(rng: random.Random) -> Numbers:
    """a x b = s, s + c = t"""
    a, b = _small_factors(rng)
    c = rng.randint(2, 9)
    return {"a": a, "b": b, "c": c, "s": a * b, "t": a * b + c}


def _times_minus(rng: random.Random) -> Numbers:
    """a x b = s, s - c = t"""
    a, b = _small_factors(rng)
    c = rng.randint(2, min(9, a * b - 2))
    return {"a": a, "b": b, "c": c, "s": a * b, "t": a * b - c}


def _minus_times(rng: random.Random) -> Numbers:
    """a x b = s, c - s = t; c is a round sum, as in paying or in a journey"""
    a, b = _small_factors(rng)
    c = 10 * rng.randint((a * b + 2 + 9) // 10, 3)
    return {"a": a, "b": b, "c": c, "s": a * b, "t": c - a * b}


def _plus_times(rng: random.Random) -> Numbers:
    """a + b = s, s x c = t"""
    s, c = rng.randint(4, 9), rng.randint(2, 9)
    a = rng.randint(2, s - 2)
    return {"a": a, "b": s - a, "c": c, "s": s, "t": s * c}


def _rectangle(rng: random.Random) -> Numbers:
    """a + b = s, s x 2 = t"""
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return {"a": max(a, b), "b": min(a, b), "s": a + b, "t": (a + b) * 2}


def _divide_plus(rng: random.Random) -> Numbers:
    """a / b = s, s + c = t"""
    b, s, c = (rng.randint(2, 9) for _ in range(3))
    return {"a": b * s, "b": b, "c": c, "s": s, "t": s + c}


def _divide_times(rng: random.Random) -> Numbers:
    """a / b = s, s x c = t"""
    b, s, c = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    c = c if c != b else c + 1
    return {"a": b * s, "b": b, "c": c, "s": s, "t": s * c}


def _plus_divide(rng: random.Random) -> Numbers:
    """a + b = s, s / c = t"""
    c = rng.randint(2, 4)
    t = rng.randint(3, 18 // c)
    a = rng.randint(max(2, c * t - 9), min(9, c * t - 2))
    return {"a": a, "b": c * t - a, "c": c, "s": c * t, "t": t}


def _average_of_two(rng: random.Random) -> Numbers:
    """a + b = s, s / 2 = t"""
    t = rng.randint(4, 9)
    gap = rng.randint(1, min(t - 2, 5))
    a, b = rng.choice(((t - gap, t + gap), (t + gap, t - gap)))
    return {"a": a, "b": b, "s": 2 * t, "t": t}


def _average_of_three(rng: random.Random) -> Numbers:
    """a + b = s, s + c = u, u / 3 = t"""
    t = rng.randint(5, 9)
    a, b = rng.randint(t - 3, t + 2), rng.randint(t - 2, t + 3)
    return {"a": a, "b": b, "c": 3 * t - a - b, "s": a + b, "u": 3 * t, "t": t}


def _minus_divide(rng: random.Random) -> Numbers:
    """a - b = s, s / c = t"""
    c, t = _small_factors(rng)
    b = rng.randint(2, 9)
    return {"a": c * t + b, "b": b, "c": c, "s": c * t, "t": t}


def _two_products(rng: random.Random) -> Numbers:
    """a x b = s, c x d = u, s + u = t"""
    a, b, c, d = (rng.randint(2, 4) for _ in range(4))
    return {"a": a, "b": b, "c": c, "d": d, "s": a * b, "u": c * d, "t": a * b + c * d}


def _more_total(rng: random.Random) -> Numbers:
    """a + c = s, a + s = t"""
    a, c = rng.randint(2, 9), rng.randint(2, 9)
    return {"a": a, "c": c, "s": a + c, "t": a + a + c}


def _fewer_total(rng: random.Random) -> Numbers:
    """a - c = s, a + s = t"""
    c, s = rng.randint(2, 9), rng.randint(2, 9)
    return {"a": s + c, "c": c, "s": s, "t": s + c + s}


def _fold_total(rng: random.Random) -> Numbers:
    """a x c = s, s + a = t, s - a = u"""
    a, c = _small_factors(rng)
    return {"a": a, "c": c, "s": a * c, "t": a * c + a, "u": a * c - a}


def _times_times(rng: random.Random) -> Numbers:
    """a x b = s, s x c = t"""
    a, c = rng.randint(2, 4), rng.randint(2, 9)
    b = rng.randint(2, 9 // a)
    return {"a": a, "b": b, "c": c, "s": a * b, "t": a * b * c}


def _steps_up(rng: random.Random) -> Numbers:
    """a + c = s, s + c = u, u + c = t"""
    a, c = rng.randint(2, 9), rng.randint(2, 6)
    return {"a": a, "c": c, "s": a + c, "u": a + 2 * c, "t": a + 3 * c}


_DRAWS: tuple[Callable[[random.Random], Numbers], ...] = (
    *(_plus_minus, _plus_plus, _minus_minus, _times_plus),
    *(_times_minus, _minus_times, _plus_times, _rectangle),
    *(_divide_plus, _divide_times, _plus_divide, _average_of_two),
    *(_average_of_three, _minus_divide, _two_products, _more_total),
    *(_fewer_total, _fold_total, _times_times, _steps_up),
)
NUMBERS: Mapping[str, Callable[[random.Random], Numbers]] = MappingProxyType(
    {draw.__name__[1:]: draw for draw in _DRAWS}
)
"""Ways to draw a problem's numbers, each named after its steps."""


def draw(problem: Problem, rng: random.Random) -> tuple[str, str]:
    """Draws a question of one form and its solution, a step per line, then the marked answer."""
    n, m = rng.sample(NAMES, 2)
    x, y = rng.sample(THINGS, 2)
    box, boxes = rng.choice(CONTAINERS)
    numbers = NUMBERS[problem.numbers](rng)
    slots = {"n": n, "m": m, "x": x, "y": y, "box": box, "boxes": boxes, **numbers}
    question = rng.choice(problem.questions).format_map(slots)
    steps = problem.solution.format_map(slots)
    return question, f"{steps}\n{MARKER}{numbers[problem.result]}"


KINDS: Mapping[str, Callable[[random.Random], tuple[str, str]]] = MappingProxyType(
    {problem.kind: partial(draw, problem) for problem in PROBLEMS}
)
