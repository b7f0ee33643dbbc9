"""Metrics on their way to the host: means, skipped steps, and what a restart needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from train.watch.pending import PendingMetrics, TooManySkipped


def metrics(loss: float, skipped: int = 0) -> dict[str, Any]:
    return {
        "loss": np.float32(loss),
        "ar_loss": np.float32(loss),
        "gradient_norm": np.float32(loss),
        "skipped": np.int32(skipped),
        "denominators": {"ar": np.float32(2.0)},
    }


def pending(folder: Path, done: int = 0) -> PendingMetrics:
    return PendingMetrics(folder, 2, lambda batch: [{"file": [batch]}], done=done)


def test_all_skipped_steps_are_named_before_the_run_is_stopped(tmp_path: Path) -> None:
    found = pending(tmp_path)
    for step, skipped in enumerate([0, 1, 2, 3], 1):
        found.add(step, metrics(float("nan") if skipped else 1.0, skipped))
    with pytest.raises(TooManySkipped, match=r"step 3: 2 steps in a row.*goes on behind them"):
        found.record()
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(2, 2), (3, 3), (4, 4)]
    assert [line["rows"] for line in lines] == [[{"file": [batch]}] for batch in (1, 2, 3)]


def test_an_interval_that_was_open_at_a_checkpoint_goes_on_from_it(tmp_path: Path) -> None:
    first = pending(tmp_path)
    first.add(1, metrics(1.0))
    first.keep(1)
    first.add(2, metrics(5.0))
    first.keep(2)  # of a checkpoint that is damaged later
    again = pending(tmp_path, done=1)
    again.add(2, metrics(2.0))
    assert again.record()["loss"] == 1.5
    again.keep(2)  # nothing is open
    assert len((tmp_path / "interval.jsonl").read_text().splitlines()) == 1
    assert pending(tmp_path, done=2).record() == {"skipped": 0.0}
