"""Prompts of random lengths for a long time: nothing may be compiled after the warm-up, and the
memory in use must stay flat."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infer.bench.subject import Subject
from infer.bench.windows import name_of
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.errors import InputError
from wedlm_jax.generation import Generation, Prepared
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.benchmark import Bar

GROWTH_ALLOWED = 0.05
"""Of the memory in use, from the end of the first quarter to the end."""
MAX_TOKENS = 160


@dataclasses.dataclass(frozen=True)
class SoakSample:
    """Says where a long run stands.

    Attributes:
      way: AR, or a window in a mode.
      minutes: since the warm-up.
      prompts, tokens: completed so far, and of the completions.
      resident_mib: memory of the process.
      compiled: programs since the warm-up.
    """

    way: str
    minutes: float
    prompts: int
    tokens: int
    resident_mib: float
    compiled: int


def soak(
    subject: Subject, window: int | str, mode: str, *, batch_size: int, minutes: float, bar: Bar
) -> Iterator[SoakSample]:
    """Decodes random prompts; looks at the beginning, once a minute, and at the end.

    Args:
      batch_size: sequences that decode together.

    Raises:
      InputError: not a prompt was done in that time.
    """
    way = name_of(window, mode)
    bar.expect(2 + int(minutes))
    bar.begin(f"{way} · warming up")
    engine = subject.engine(window, batch_size)
    params = SamplingParams(mode=mode, max_tokens=MAX_TOKENS)
    engine.expect([params])
    engine.compile()
    programs, started = engine.num_programs, time.monotonic()
    work = random_work(
        subject.config.vocab_size,
        engine.max_model_len - MAX_TOKENS,
        params,
        until=started + 60 * minutes,
    )
    prompts = tokens = seen = 0
    minute = -1
    for some in Generation(EngineLoop(engine), subject.codec, work):
        prompts += len(some)
        tokens += sum(len(completion.token_ids) for _, completion in some)
        now = (time.monotonic() - started) / 60
        sample = SoakSample(
            way, now, prompts, tokens, resident_bytes() / 2**20, engine.num_programs - programs
        )
        if prompts and int(now) > minute:
            minute, seen = int(now), prompts
            bar.begin(f"{way} · {prompts:,} prompts, {sample.resident_mib:,.0f} MiB")
            yield sample
    if not prompts:
        raise InputError(f"--minutes {minutes:g}: over before the first prompt was done")
    if seen < prompts:
        yield sample


def random_work(
    vocab_size: int, longest: int, params: SamplingParams, *, until: float
) -> Iterator[Prepared]:
    """Yields random tokens of random lengths, short ones most often, until the time has come."""
    rng = np.random.default_rng(0)
    number = 0
    while time.monotonic() < until:
        length, limit = (
            round(float(np.exp(rng.uniform(0, np.log(most))))) for most in (longest, MAX_TOKENS)
        )
        prompt = rng.integers(0, vocab_size, length).tolist()
        yield prompt, dataclasses.replace(params, max_tokens=limit, seed=number)
        number += 1


def resident_bytes() -> int:
    """Returns the memory that this process has in use; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(samples: Sequence[SoakSample]) -> float:
    """Returns the share by which the memory in use has grown since the first quarter."""
    return samples[-1].resident_mib / samples[len(samples) // 4].resident_mib - 1


def failure_of(samples: Sequence[SoakSample]) -> str | None:
    """Returns which promise a run has broken; None if it has kept all."""
    last = samples[-1]
    if last.compiled:
        return f"{last.way}: {last.compiled} programs were compiled on the way"
    if growth(samples) > GROWTH_ALLOWED:
        return (
            f"{last.way}: memory grew by {growth(samples):.1%} since the first quarter, "
            f"more than {GROWTH_ALLOWED:.0%}"
        )
    return None
