"""Tokens a second of a regime's questions, by sequences that decode together and by window."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from infer.bench.rival import RIVAL, Rival
from infer.bench.subject import Subject, forget_programs
from infer.bench.work import MAX_TOKENS, Regimes, Work, questions_of
from infer.speed import Speed
from wedlm_jax.benchmark import Bar, by_turns
from wedlm_jax.completion import Completion, Drafts, total_drafts
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.generation import Generation

if TYPE_CHECKING:
    from wedlm_jax.engine.engine import Engine


class Pass(NamedTuple):
    """All prompts decoded once."""

    tokens: int
    forwards: int
    seconds: float
    compile_seconds: float = 0.0
    drafts: Drafts = Drafts()


def name_of(window: int | str, mode: str) -> str:
    """Returns the name of a way of decoding in tables."""
    return "AR" if window == 0 else f"W = {window}, {mode}"


def ways_of(windows: Sequence[int | str], modes: Sequence[str]) -> list[tuple[int | str, str]]:
    """Lists each window in each mode; AR, which knows no modes, once and first."""
    ways: list[tuple[int | str, str]] = [(0, "verified")] if 0 in windows else []
    return ways + [(window, mode) for mode in modes for window in windows if window != 0]


def compare_windows(
    subject: Subject,
    regimes: Regimes,
    *,
    batch_sizes: Sequence[int],
    windows: Sequence[int | str],
    modes: Sequence[str],
    prompts: int | None,
    passes: int,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[list[Speed]]:
    """Measures every way; yields the speeds of one regime at one number of sequences at a time.

    Args:
      prompts: of a regime, at most; by default twice as many as sequences, at least 24.
      rival: what to compare with, if anything.
    """
    for sequences in batch_sizes:
        engines = {window: subject.engine(window, sequences) for window in windows}
        for regime, questions in regimes.items():
            count = prompts or max(2 * sequences, 24)
            runs: dict[str, Callable[[], Pass]] = {}
            for window, mode in ways_of(windows, modes):
                work = questions_of(subject, questions, count, mode)
                runs[name_of(window, mode)] = partial(decode, subject, engines[window], work)
            if rival is not None:
                asked = [prompt for prompt, _ in questions_of(subject, questions, count, "ar")]
                runs[RIVAL] = partial(decode_elsewhere, rival, asked, sequences)
            made = by_turns(runs, passes, bar, f"{sequences} sequences, {regime}")
            prompts_each = min(count, len(questions))
            yield [speed_of(name, regime, sequences, prompts_each, made[name]) for name in runs]
        del engines
        forget_programs()


def speed_of(way: str, regime: str, sequences: int, prompts: int, passes: Sequence[Pass]) -> Speed:
    """Returns the speed of the timed passes: of all but the first, which compiled."""
    return Speed(
        way,
        regime,
        sequences,
        prompts,
        tokens=passes[-1].tokens,
        forwards=passes[-1].forwards,
        seconds=[one.seconds for one in passes[1:]],
        compile_seconds=sum(one.compile_seconds for one in passes),
        drafts=passes[-1].drafts._asdict(),
    )


def decode(subject: Subject, engine: Engine, work: Work) -> Pass:
    """Decodes all prompts as `LLM.generate` does, and caches no prefix from pass to pass. Compiling
    is not counted."""
    engine.scheduler.forget_prefixes()
    done: list[Completion] = []
    compiled, started = engine.compile_seconds, time.perf_counter()
    for some in Generation(EngineLoop(engine), subject.codec, work):
        done += [completion for _, completion in some]
    seconds = time.perf_counter() - started
    compiling = engine.compile_seconds - compiled
    return Pass(
        tokens=sum(len(one.token_ids) for one in done),
        forwards=sum(one.num_forwards for one in done),
        seconds=seconds - compiling,
        compile_seconds=compiling,
        drafts=total_drafts(done),
    )


def decode_elsewhere(
    rival: Rival, prompts: Sequence[list[int]], sequences: int, *, lookup: bool = False
) -> Pass:
    """Decodes all prompts by another library, with drafts from the text or without."""
    before, started = rival.forwards, time.perf_counter()
    answers = rival.decode(prompts, max_tokens=MAX_TOKENS, sequences=sequences, lookup=lookup)
    seconds = time.perf_counter() - started
    tokens = sum(len(answer) for answer in answers)
    # A forward of a batch is one of each sequence that has not ended.
    return Pass(tokens, rival.forwards - before if lookup else tokens, seconds)
