"""`window_size="auto"` on the embedded model: not slower than AR, on however many rows."""

from __future__ import annotations

import dataclasses
import statistics
import time
from pathlib import Path

import pytest

import infer.bench
from infer.bench import mixed_lengths
from infer.evaluate import EMBEDDED_QUESTIONS
from infer.heldout import read_questions
from wedlm_jax.llm import LLM
from wedlm_jax.scheduler import Row

TURNS = {1: 15, 8: 15, 32: 15, 128: 5}
"""By rows: the more there are, the longer a turn takes and the steadier it is."""
ROUNDS = 3
"""Of turns, at most: a decoder that is slower is so in each, a machine that is busy is not."""
NOISE = 0.1
"""Of the median of these, on a machine whose cores are shared with other tests."""


def seconds(llm: LLM, work: list[Row]) -> float:
    compiled, started = llm.engine.compile_seconds, time.perf_counter()
    for _ in llm.run(work):
        pass
    return time.perf_counter() - started - (llm.engine.compile_seconds - compiled)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "mode"), [(1, "paper"), (8, "verified"), (32, "paper"), (128, "verified")]
)
def test_auto_is_not_slower_than_autoregressive(
    rows: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By more than `NOISE`, when windows have had their first tries."""
    monkeypatch.setattr(infer.bench, "LENGTHS", (4, 64))
    ar, auto = (LLM(window_size=window, max_batch_size=rows) for window in (0, "auto"))
    work = mixed_lengths(ar, read_questions(Path(EMBEDDED_QUESTIONS)), max(2 * rows, 24))
    of_mode = [(prompt, dataclasses.replace(params, mode=mode)) for prompt, params in work]
    seconds(ar, work)  # compiles
    for _ in range(TURNS[rows] // 2):  # compiles, and learns what windows are worth
        seconds(auto, of_mode)
    medians: list[float] = []
    while len(medians) < ROUNDS and max(medians, default=0.0) < 1 - NOISE:
        ratios = [seconds(ar, work) / seconds(auto, of_mode) for _ in range(TURNS[rows])]
        medians.append(statistics.median(ratios))
    assert medians[-1] > 1 - NOISE, medians
