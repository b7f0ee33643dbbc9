"""Evaluation in mid-run: the same rows and masks every time, and the decoder's numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_run import metric_lines, on_devices, tiny_recipe
from train.config import EvaluationSection
from train.evaluation import prompts_of
from train.loop import train as run_training


def test_a_run_evaluates_on_its_way_and_trains_as_without(
    finished: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_devices(monkeypatch, 1)
    section = EvaluationSection(every=2, rows=4, prompts=2, max_tokens=6)
    run_training(tiny_recipe(tmp_path, tokenizer_folder, evaluation=section))
    assert metric_lines(tmp_path) == metric_lines(finished)
    lines = [json.loads(line) for line in (tmp_path / "evaluation.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    for line in lines:
        assert line["ar_perplexity"] == pytest.approx(math.exp(line["ar_loss"]))
        assert line["loss"] == pytest.approx((line["mlm_loss"] + line["ar_loss"]) / 2)
        # A window never commits more than half of the slots that it runs.
        assert 0 < line["p_cache"] <= 0.5
        assert 0 < line["tokens_per_forward"] <= 16
        assert any(name.startswith("mlm_loss_ratio_") for name in line)
    assert lines[1]["ar_loss"] < lines[0]["ar_loss"]


def test_a_prompt_is_what_stands_before_the_first_trainable_token() -> None:
    rows = {
        "tokens": np.array([[1, 2, 3, 4, 5, 6, 7, 0], [9, 8, 0, 0, 0, 0, 0, 0]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]]),
        "trainable": np.array([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0]], bool),
    }
    # The second sample is a document, trainable from its start: its first half.
    assert prompts_of(rows, 5) == [[1, 2], [4, 5], [9]]
    assert prompts_of(rows, 2) == [[1, 2], [4, 5]]
    assert prompts_of(rows, 0) == []
