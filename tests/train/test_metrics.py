"""Metrics: what becomes of a step's numbers, and a log that survives its run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from train.metrics import MetricsLog, StepClock, TensorBoard, as_json, cut_back, flatten
from wedlm_jax.errors import InputError


class Heard:
    def __init__(self) -> None:
        self.records: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, record: dict[str, float]) -> None:
        self.records.append((step, record))

    def close(self) -> None:
        self.closed = True


RECORD = {"loss": 1.5, "step_seconds": 2.0, "tokens_per_second": 512.0, "input_wait": 0.0}


def test_losses_by_ratio_become_numbers_and_empty_bins_none() -> None:
    metrics = {"loss": np.float32(2), "mlm_loss_by_ratio": np.array([0.5, 0, 1, 2], np.float32)}
    assert flatten(metrics) == {
        "loss": 2.0,
        "mlm_loss_ratio_0.00_0.25": 0.5,
        "mlm_loss_ratio_0.50_0.75": 1.0,
        "mlm_loss_ratio_0.75_1.00": 2.0,
    }


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
    assert capsys.readouterr().out == "5 of 10 steps, loss 1.5, 512 tokens/s, 0:10 left\n"
    assert heard.records == [(5, RECORD)]
    assert heard.closed


def test_records_behind_the_resumed_step_and_torn_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [as_json(step, {"loss": 1.0}) for step in (2, 4, 6)]
    path.write_bytes("".join(lines).encode() + b'{"step": 8, "lo\xff')
    cut_back(path, 4)
    assert path.read_text() == "".join(lines[:2])
    cut_back(tmp_path / "none.jsonl", 4)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_clock_counts_steps_and_waiting_since_the_last_reading() -> None:
    now = [100.0]
    clock = StepClock(lambda: now[0])
    now[0] = 160.0  # compiling
    clock.restart()
    for waited in (0.5, 0.5):
        now[0] += 5.0
        clock.count(waited)
    assert clock.read(1000) == {"step_seconds": 5.0, "tokens_per_second": 200.0, "input_wait": 0.1}
    now[0] += 4.0
    clock.count(0.0)
    assert clock.read(1000)["step_seconds"] == 4.0


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    board = TensorBoard(tmp_path, done=0)
    board.write(7, RECORD)
    board.close()
    (file,) = tmp_path.iterdir()
    content, values, at = file.read_bytes(), {}, 0
    while at < len(content):  # length, its checksum, the event, its checksum
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        values |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        at += 16 + size
    assert values == {(7, name): pytest.approx(value) for name, value in RECORD.items()}


def test_without_tensorboardx_the_recipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(InputError, match=r"metrics\.tensorboard needs tensorboardX"):
        TensorBoard(tmp_path, done=0)
