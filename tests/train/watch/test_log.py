"""The log of a run: what a person reads, and a file that survives its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from train.watch.log import MetricsLog
from train.watch.records import as_json, cut_back


class Heard:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, record: dict[str, float]) -> None:
        self.records.append((step, record))

    def close(self) -> None:
        self.closed = True


RECORD = {"loss": 1.5, "step_seconds": 2.0, "tokens_per_second": 512.0, "input_wait": 0.0}


def test_what_is_not_finite_is_null_in_the_files() -> None:
    line = as_json(3, {"loss": float("nan"), "norm": float("inf"), "lr": 0.5})
    assert json.loads(line) == {"step": 3, "loss": None, "norm": None, "lr": 0.5}
    assert "NaN" not in line


def test_a_record_goes_to_the_file_the_line_and_the_sinks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    heard = Heard()
    log = MetricsLog(tmp_path, 10, 0, "wedlm", [heard])
    log.write(5, RECORD)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 5, **RECORD}
    said = capsys.readouterr().out
    assert said == "5 of 10 steps, loss 1.5, 512 tokens/s, 0:00 elapsed, 0:10 left\n"
    assert heard.records == [(5, RECORD)]
    assert heard.closed


def test_before_the_first_record_it_says_how_far_the_steps_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("wedlm_jax.host.progress.FIRST_LINE_S", 0.0)
    log = MetricsLog(tmp_path, 10, 0, "wedlm")
    log.step(1)
    log.expect(5)
    log.write(5, RECORD)
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1 of 10 steps, losses come after step 5, 0 s so far"
    assert second.startswith("5 of 10 steps, loss 1.5, ")


def test_the_line_has_the_epochs_of_the_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = MetricsLog(tmp_path, 10, 0, "wedlm")
    log.write(5, {**RECORD, "epoch/a": 0.5, "epoch/b": 3.004, "epoch/c": 2.0})
    log.write(6, {**RECORD, "epoch": 1.25})
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "loss 1.5, epochs 0.50 to 3.00, 512 tokens/s" in first
    assert "loss 1.5, epoch 1.25, 512 tokens/s" in second


def test_an_evaluation_goes_to_its_file_and_by_its_own_names_to_the_sinks(tmp_path: Path) -> None:
    for done in (0, 4):  # what is done again is told again
        heard = Heard()
        log = MetricsLog(tmp_path, 10, done, "wedlm", [heard])
        for step in (4, 8):
            if step > done:
                log.evaluated(step, {"ar_loss": 2.0, "question_accuracy": 0.5})
        log.close()
        assert heard.records[-1] == (
            8,
            {"evaluation/ar_loss": 2.0, "evaluation/question_accuracy": 0.5},
        )
    lines = (tmp_path / "evaluation.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [4, 8]
    assert json.loads(lines[1])["question_accuracy"] == 0.5
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_records_behind_the_resumed_step_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [as_json(step, {"loss": 1.0}) for step in (2, 4, 6)]
    path.write_bytes("".join(lines).encode() + b'{"step": 8, "lo\xff')
    assert [record["step"] for record in cut_back(path, 4)] == [2, 4]
    assert path.read_text() == "".join(lines[:2])
    assert cut_back(tmp_path / "none.jsonl", 4) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
