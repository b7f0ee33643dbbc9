"""Milliseconds of a forward, and of a prompt, against the products in them alone."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from infer.bench.products import milliseconds_of_products
from infer.bench.rival import RIVAL
from infer.bench.subject import Subject, random_prompts
from infer.bench.windows import name_of, ways_of
from infer.bench.work import Regimes, Work, long_answers
from wedlm_jax.benchmark import Bar, Stopwatch, by_turns
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.events import Finished
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from infer.bench.rival import Rival
    from wedlm_jax.engine.engine import Engine

FORWARDS_OF_ONE, FORWARDS_OF_MANY = 64, 8
"""Forwards of a timed burst: with one sequence, and with several that decode autoregressively.
Several windows are timed one forward at a time, since their answers end after a few."""
PROMPT_ROOM = 64
"""Tokens of a prompt among many, at most."""
ANSWERS = 6
"""Answers in the midst of which forwards are timed, at least."""
SECONDS = 2.0
"""No burst is timed after so many in a pass."""
PROMPT_TOKENS, RANDOM_TOKENS = 32, 160
"""Of random prompts, and after each."""
RIVAL_TOKENS = 16
PROMPTS = 16
"""Requests whose prompts are timed, one after another."""


@dataclasses.dataclass(frozen=True)
class ForwardCost:
    """A forward of sequences that are all in the midst of their completions.

    Attributes:
      way: AR, a window in a mode, or a rival.
      sequences: that decode together.
      tokens, computed: real ones a forward, and those with the padding of its size; 0 for a rival.
      milliseconds: of a forward, the host's share in bursts included, pass by pass.
      floor: of linear layers and head alone at as many tokens, pass by pass; empty for a rival.
    """

    way: str
    sequences: int
    tokens: float
    computed: float
    milliseconds: list[float]
    floor: list[float]

    @property
    def ratio(self) -> float:
        """A forward against its floor, median against median."""
        return statistics.median(self.milliseconds) / max(statistics.median(self.floor), 1e-9)


@dataclasses.dataclass(frozen=True)
class PromptCost:
    """A request for one token, alone, nothing of its prompt known: milliseconds, pass by pass.

    The fixed cost of a prompt is what such a request takes beyond one decode forward, since its
    only forward also says the first token.

    Attributes:
      way: AR, or a window in a mode.
      tokens: of a prompt, mean.
      request: from submitting to the result.
      device: of that, in compiled programs; the rest is the host's.
      forward: a decode forward of one sequence, of `ForwardCost`.
    """

    way: str
    tokens: float
    request: list[float]
    device: list[float]
    forward: float

    @property
    def fixed(self) -> float:
        return statistics.median(self.request) - self.forward

    @property
    def host(self) -> float:
        return statistics.median(self.request) - statistics.median(self.device)


def compare_floor(
    subject: Subject,
    regimes: Regimes | None,
    *,
    batch_sizes: Sequence[int],
    windows: Sequence[int | str],
    modes: Sequence[str],
    passes: int,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[list[ForwardCost] | list[PromptCost]]:
    """Measures forwards, one number of sequences after another, and then prompts.

    Args:
      regimes: whose questions are asked; None for random prompts.
    """
    alone: dict[str, float] = {}
    for sequences in batch_sizes:
        # Many prompts pass at once: else the first answers would end before the last begin.
        chunk = PROMPT_ROOM * sequences if sequences > 1 else None
        engines = {
            window: subject.engine(window, sequences, chunk_tokens=chunk) for window in windows
        }
        costs = _forwards(subject, regimes, engines, modes, sequences, passes, rival, bar)
        yield costs
        if sequences == 1:
            alone = {cost.way: statistics.median(cost.milliseconds) for cost in costs}
            yield _prompts(subject, regimes, engines, modes, passes, alone, bar)


def _forwards(
    subject: Subject,
    regimes: Regimes | None,
    engines: dict[int | str, Engine],
    modes: Sequence[str],
    sequences: int,
    passes: int,
    rival: Rival | None,
    bar: Bar,
) -> list[ForwardCost]:
    ways: dict[str, Callable[[], tuple[float, float, float, float]]] = {}
    for window, mode in ways_of(list(engines), modes):
        engine = engines[window]
        work = _work(subject, regimes, max(sequences, ANSWERS), mode)
        ways[name_of(window, mode)] = partial(_forward_and_floor, engine, work, sequences)
    if rival is not None:
        prompts = [prompt for prompt, _ in _work(subject, regimes, sequences, "ar")]
        ways[RIVAL] = partial(_rival_forward, rival, prompts)
    made = by_turns(ways, passes, bar, f"{sequences} sequences")
    return [_forward_cost(name, sequences, some[1:]) for name, some in made.items()]


def _forward_cost(
    way: str, sequences: int, passes: Sequence[tuple[float, float, float, float]]
) -> ForwardCost:
    milliseconds, floor, tokens, computed = zip(*passes, strict=True)
    return ForwardCost(
        way,
        sequences,
        statistics.fmean(tokens),
        statistics.fmean(computed),
        list(milliseconds),
        [one for one in floor if one],
    )


def _work(subject: Subject, regimes: Regimes | None, count: int, mode: str) -> Work:
    if regimes is not None:
        return long_answers(subject, regimes, count, mode)
    params = SamplingParams(mode=mode, max_tokens=RANDOM_TOKENS, ignore_eos=True)
    return [(prompt, params) for prompt in random_prompts(subject.config, count, PROMPT_TOKENS)]


def _rival_forward(rival: Rival, prompts: Sequence[list[int]]) -> tuple[float, float, float, float]:
    return rival.milliseconds_a_token(prompts, RIVAL_TOKENS), 0.0, 0.0, 0.0


def _forward_and_floor(
    engine: Engine, work: Work, sequences: int
) -> tuple[float, float, float, float]:
    """Returns milliseconds of a forward and of its floor, real and computed tokens a forward."""
    engine.scheduler.forget_prefixes()
    seconds, counted = 0.0, np.zeros(3, np.int64)
    for start in range(0, len(work), sequences):
        some = work[start : start + sequences]
        if seconds < SECONDS and len(some) == sequences:
            more, counts = _forwards_amid(engine, some)
            seconds, counted = seconds + more, counted + counts
    if not counted[0]:
        raise InputError("floor: the completions end before a forward can be timed")
    forwards, tokens, computed = counted.tolist()
    floor = milliseconds_of_products(engine, max(round(tokens / forwards), 1))
    return seconds / forwards * 1e3, floor, tokens / forwards, computed / forwards


def _forwards_amid(engine: Engine, work: Work) -> tuple[float, np.ndarray]:
    """Returns seconds of bursts in which all sequences decode, and what was counted in these."""
    submitted = [Request(number, prompt, params) for number, (prompt, params) in enumerate(work)]
    prompts = math.ceil(sum(len(prompt) for prompt, _ in work) / engine.settings.chunk_tokens)
    events = engine.step(submitted, max_forwards=prompts)
    ended = any(isinstance(event, Finished) for event in events)
    many = 1 if engine.window_size else FORWARDS_OF_MANY
    forwards = FORWARDS_OF_ONE if len(work) == 1 else many
    seconds, counted = 0.0, np.zeros(3, np.int64)
    while not ended and seconds < SECONDS:
        before, started = engine.device.counters.copy(), time.perf_counter()
        events = engine.step(max_forwards=forwards)
        passed = time.perf_counter() - started
        ended = any(isinstance(event, Finished) for event in events)
        # Where one of several has finished, the forwards after that had fewer sequences.
        if not ended or len(work) == 1 or forwards == 1:
            seconds, counted = seconds + passed, counted + engine.device.counters - before
    engine.step(aborted=range(len(work)), max_forwards=0)
    return seconds, counted


def _prompts(
    subject: Subject,
    regimes: Regimes | None,
    engines: dict[int | str, Engine],
    modes: Sequence[str],
    passes: int,
    forwards: dict[str, float],
    bar: Bar,
) -> list[PromptCost]:
    ways: dict[str, Callable[[], tuple[float, float, float]]] = {}
    for window, mode in ways_of(list(engines), modes):
        engine = engines[window]
        work = _work(subject, regimes, PROMPTS, mode)
        ways[name_of(window, mode)] = partial(_requests, engine, work)
    made = by_turns(ways, passes, bar, "prompts")
    return [
        PromptCost(
            name,
            some[0][2],
            [request for request, _, _ in some[1:]],
            [device for _, device, _ in some[1:]],
            forwards[name],
        )
        for name, some in made.items()
    ]


def _requests(engine: Engine, work: Work) -> tuple[float, float, float]:
    """Returns milliseconds of a request for one token, those of it in programs, and its prompt's
    tokens: medians over the prompts, and a mean."""
    requests: list[float] = []
    device: list[float] = []
    for number, (prompt, params) in enumerate(work):
        one = Request(number, prompt, dataclasses.replace(params, max_tokens=1))
        engine.decode([one])  # whatever is not compiled yet is so now
        engine.scheduler.forget_prefixes()
        whole, watch = Stopwatch(), Stopwatch()
        # Both of the same call: a busy machine would make nonsense of a difference of two.
        with _programs_watched(engine, watch):
            whole.around(engine.decode)([one])
        requests.append(whole.seconds * 1e3)
        device.append(watch.seconds * 1e3)
    length = statistics.fmean(len(prompt) for prompt, _ in work)
    return statistics.median(requests), statistics.median(device), length


@contextmanager
def _programs_watched(engine: Engine, watch: Stopwatch) -> Iterator[None]:
    """Times the compiled programs from their call until what they return is there. They must all
    be compiled: those that come later are not seen."""
    kept: Any = engine.device.programs
    programs = kept._compiled

    def watched(program: Any) -> Callable[..., Any]:
        return watch.around(lambda *inputs: jax.block_until_ready(program(*inputs)))

    kept._compiled = {key: watched(program) for key, program in programs.items()}
    try:
        yield
    finally:
        kept._compiled = programs
