"""The log of a run: its numbers, where its time went, and what a person and boards read."""

import json
import sys
import types
from unittest.mock import Mock, call

import numpy as np
import pytest

from train.recipe.skipped_batches import SkippedBatches
from train.watch.log import MetricsLog, TensorBoard, Wandb, run_id
from train.watch.records import Interval, PendingMetrics, TooManySkipped, as_json, cut_back
from train.watch.run_time import KINDS, Attempt, RunTime, read_attempts, shares

RECORD = {"loss": 1.5, "step_seconds": 2.0, "tokens_per_second": 512.0, "input_wait": 0.0}


def test_what_is_not_finite_is_null_in_the_files():
    line = as_json(3, {"loss": float("nan"), "norm": float("inf"), "lr": 0.5})
    assert json.loads(line) == {"step": 3, "loss": None, "norm": None, "lr": 0.5}
    assert "NaN" not in line


def test_a_log_is_written_to_files_to_a_line_and_to_boards(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wedlm_jax.host.progress.FIRST_LINE_S", 0.0)
    board, first = Mock(), {**RECORD, "epoch/a": 0.5, "epoch/b": 3.004, "epoch/c": 2.0}
    log = MetricsLog(tmp_path, 10, 0, "wedlm", [board])
    log.step(1)
    log.expect(5)
    log.write(5, first)
    log.evaluated(5, {"ar_loss": 2.0})
    log.write(6, {**RECORD, "epoch": 1.25})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0]) == {"step": 5, **first}
    assert json.loads((tmp_path / "evaluation.jsonl").read_text()) == {"step": 5, "ar_loss": 2.0}
    assert board.mock_calls[:2] == [
        call.write(5, first),
        call.write(5, {"evaluation/ar_loss": 2.0}),
    ]
    assert board.mock_calls[-1] == call.close()
    assert capsys.readouterr().out.splitlines() == [
        "1 of 10 steps, losses come after step 5, 0 s so far",
        "5 of 10 steps, loss 1.5, epochs 0.50 to 3.00, 512 tokens/s, 0:00 elapsed, 0:10 left",
        "6 of 10 steps, loss 1.5, epoch 1.25, 512 tokens/s, 0:00 elapsed, 0:08 left",
    ]
    MetricsLog(tmp_path, 10, 4, "wedlm").close()  # what is done again is told again
    for name in ("metrics.jsonl", "evaluation.jsonl"):
        assert (tmp_path / name).read_text() == ""


def test_records_behind_the_resumed_step_and_torn_lines_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [as_json(step, {"loss": 1.0}) for step in (2, 4, 6)]
    path.write_bytes("".join(lines).encode() + b'{"step": 8, "lo\xff')
    assert [record["step"] for record in cut_back(path, 4)] == [2, 4]
    assert path.read_text() == "".join(lines[:2])
    assert cut_back(tmp_path / "none.jsonl", 4) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


SHOWN = {"loss": 1.5, "tokens_per_second": 512.0}


def test_tensorboard_has_every_number(tmp_path):
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event

    board = TensorBoard(tmp_path, done=0)
    board.write(7, SHOWN)
    board.close()
    (file,) = tmp_path.iterdir()
    content, values, at = file.read_bytes(), {}, 0
    while at < len(content):  # length, its checksum, the event, its checksum
        size = int.from_bytes(content[at : at + 8], "little")
        event = Event.FromString(content[at + 12 : at + 12 + size])
        values |= {(event.step, value.tag): value.simple_value for value in event.summary.value}
        at += 16 + size
    assert values == {(7, name): pytest.approx(value) for name, value in SHOWN.items()}


def test_two_runs_of_one_name_are_two_runs_at_wandb_and_a_restart_is_none(tmp_path, monkeypatch):
    begun = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **settings: begun.append(settings)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for user in ("ada", "bob", "ada"):
        folder = tmp_path / user / "wedlm_8b"
        folder.mkdir(parents=True, exist_ok=True)
        Wandb("project", folder, {})
    ada, bob, again = [(run["id"], run["name"], run["resume"]) for run in begun]
    assert ada[1:] == bob[1:] == ("wedlm_8b", "allow")
    assert ada[0] != bob[0]
    assert again == ada
    assert run_id(tmp_path / "bob" / "wedlm_8b") == bob[0]


def step(mlm, masked, ar, targets, **more):
    """Metrics of a step on the host."""
    counts = {
        "mlm": np.float32(masked),
        "masked": np.float32(masked),
        "ar": np.float32(targets),
        "masked_by_ratio": np.array([0, masked], np.float32),
    }
    return {
        "loss": np.float32((mlm + ar) / 2),
        "mlm_loss": np.float32(mlm),
        "ar_loss": np.float32(ar),
        "mlm_loss_by_ratio": np.array([0, mlm], np.float32),
        "gradient_norm": np.float32(1.0),
        "learning_rate": np.float32(0.5),
        "skipped": np.int32(0),
        "denominators": counts,
        **more,
    }


def test_a_loss_is_the_mean_of_all_tokens_of_the_interval_and_a_skipped_step_spoils_none():
    interval = Interval(ar_weight=0.5)
    interval.add(step(4.0, 10, 2.0, 100, gradient_norm=np.float32(1.0)))
    interval.add(step(1.0, 30, 3.0, 300, gradient_norm=np.float32(2.0), learning_rate=0.25))
    interval.add(step(np.nan, 9, np.nan, 9, gradient_norm=np.nan, skipped=np.int32(1)))
    record = interval.record()
    assert record["mlm_loss"] == (4 * 10 + 1 * 30) / 40
    assert record["mlm_loss_ratio_0.50_1.00"] == record["mlm_loss"]
    assert "mlm_loss_ratio_0.00_0.50" not in record
    assert record["ar_loss"] == (2 * 100 + 3 * 300) / 400
    assert record["loss"] == pytest.approx((record["mlm_loss"] + 0.5 * record["ar_loss"]) / 1.5)
    assert record["gradient_norm"] == 1.5  # of steps
    assert record["learning_rate"] == 0.5  # the newest
    assert record["skipped"] == 1
    assert interval.empty
    interval.add(step(np.nan, 10, np.nan, 100, skipped=np.int32(2)))
    assert not interval.empty
    assert interval.record() == {"learning_rate": 0.5, "skipped": 1.0}


def by_source(mlm, masked, tokens):
    """Metrics of a step that tells three sources apart; AR losses are twice those of masks."""
    whole = step(1.0, sum(masked), 2.0, sum(tokens))
    losses, weights, counts = (np.array(x, np.float32) for x in (mlm, masked, tokens))
    whole |= {"mlm_loss_by_source": losses, "ar_loss_by_source": 2 * losses}
    whole["denominators"] |= {
        "mlm_by_source": weights,
        "ar_by_source": counts,
        "tokens_by_source": counts,
    }
    return whole


NAMES = ["data/web", "data/code", "data/books"]


def test_losses_by_source_are_means_of_its_tokens_also_from_a_state_on_and_with_other_sources():
    begun, interval = Interval(sources=NAMES), Interval(sources=NAMES)
    begun.add(by_source([4 / 3, 8, 0], [10, 5, 0], [100, 50, 0]))
    state = json.dumps(begun.state())
    interval.restore(json.loads(state))
    interval.add(by_source([1, 0, 0], [30, 0, 0], [300, 20, 0]))  # of the code no mask
    skipped = by_source([np.nan] * 3, [1, 1, 1], [100, 100, 100])
    interval.add({**skipped, "skipped": np.int32(1)})
    record = interval.record()
    web = np.float64(np.float32(4 / 3))
    assert {name: x for name, x in record.items() if "/" in name} == {
        "mlm_loss/data/web": (web * 10 + 1 * 30) / 40,
        "mlm_loss/data/code": 8.0,
        "ar_loss/data/web": 2 * (web * 100 + 1 * 300) / 400,
        "ar_loss/data/code": 16 * 50 / 70,
        "tokens/data/web": 400.0,
        "tokens/data/code": 70.0,
    }
    assert interval.empty
    other = Interval(sources=["data/books", "data/web"])
    other.restore(json.loads(state))
    other.add(by_source([2, 1], [7, 30], [70, 300]))
    later = other.record()
    assert later["mlm_loss/data/web"] == record["mlm_loss/data/web"]
    assert (later["mlm_loss/data/books"], later["mlm_loss/data/code"]) == (2.0, 8.0)
    assert later["tokens/data/web"] == 400


def metrics(loss, skipped=0):
    return step(loss, 2, loss, 2, skipped=np.int32(skipped))


def pending(folder, done=0):
    return PendingMetrics(folder, 2, lambda batch: [{"file": [batch]}], SkippedBatches(), done=done)


def test_all_skipped_steps_are_named_before_the_run_is_stopped(tmp_path):
    found = pending(tmp_path)
    for number, skipped in enumerate([0, 1, 2, 3], 1):
        found.add(number, metrics(float("nan") if skipped else 1.0, skipped))
    with pytest.raises(TooManySkipped, match=r"step 3: 2 steps in a row.*continues after them"):
        found.record()
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(2, 2), (3, 3), (4, 4)]
    assert [line["rows"] for line in lines] == [[{"file": [batch]}] for batch in (1, 2, 3)]


def test_an_interval_that_was_open_at_a_checkpoint_goes_on_from_it(tmp_path):
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


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds


def attempt(begun, seen, first, last, **seconds):
    return Attempt(begun, seen, first, last, {**dict.fromkeys(KINDS, 0.0), **seconds})


def test_speed_leaves_out_what_is_no_step(tmp_path):
    clock = Clock()
    time = RunTime(clock)
    clock.tick(7)
    with time.spent("compile"):
        clock.tick(60)
    time.begin(tmp_path, 10)
    for step in (11, 12):
        with time.spent("input"):
            clock.tick(0.5)
        clock.tick(4.5)
        time.step(step, 1000, 3.0)
        with time.spent("checkpoint"):
            clock.tick(100)
    record = time.read(peak_flops=2.0)
    assert record["step_seconds"] == 5.0
    assert record["tokens_per_second"] == 200.0
    assert record["input_wait"] == 0.1
    assert record["mfu"] == 6 / 10 / 2
    assert record["goodput"] == pytest.approx(9 / 277, abs=1e-4)
    clock.tick(4)
    time.step(13, 500)
    later = time.read()
    assert (later["step_seconds"], later["tokens_per_second"]) == (4.0, 125.0)
    assert "mfu" not in later
    time.close()
    [written] = read_attempts(tmp_path / "time.json")
    seconds = {"start": 7, "compile": 60, "input": 1, "checkpoint": 200}
    assert written == attempt(1000, clock.now, 10, 13, **seconds)


def test_what_was_done_again_and_the_time_between_is_no_goodput():
    # 100 steps in 100 s, of which 60 are on disk; 50 s later a second attempt takes 10 s to begin.
    first = attempt(0, 120, 0, 100, start=5, compile=15)
    second = attempt(170, 240, 60, 110, start=10, compile=10)
    found = shares([first, second])
    assert sum(found.values()) == pytest.approx(1)
    seconds = {kind: round(240 * share, 6) for kind, share in found.items() if share}
    spent = {"steps": 60 + 50, "redone": 40, "restart": 50 + 10, "start": 5, "compile": 25}
    assert seconds == spent
    # An attempt that a later one undoes was for nothing.
    found = shares([attempt(0, 10, 0, 10), attempt(10, 20, 10, 20), attempt(20, 30, 5, 15)])
    assert found["steps"] == pytest.approx((5 + 0 + 10) / 30)
    assert found["redone"] == pytest.approx((5 + 10) / 30)


def test_a_second_attempt_goes_on_with_the_file(tmp_path, capsys):
    for begins in (0, 2):
        clock = Clock()
        clock.tick(begins * 10)
        time = RunTime(clock)
        time.begin(tmp_path, begins)
        clock.tick(10)
        time.step(begins + 2, 1)
        time.close()
    assert [a["first"] for a in json.loads((tmp_path / "time.json").read_text())] == [0, 2]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "time since the run began (0:10): steps 100.0%",
        "time since the run began (0:30, 2 attempts): steps 66.7%, "
        "between attempts and restarting 33.3%",
    ]
    (tmp_path / "time.json").write_text('[{"begun": 1')
    assert read_attempts(tmp_path / "time.json") == []
