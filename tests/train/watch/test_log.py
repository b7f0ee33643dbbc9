"""The log of a run: what a person reads, a file that survives its run, and boards."""

import json
import sys
import types

import pytest

from tests.examples.tiny_run import tiny_recipe
from train.loop import train as run_training
from train.recipe.config import MetricsSection
from train.watch.log import MetricsLog, TensorBoard, Wandb, run_id
from train.watch.records import as_json, cut_back
from wedlm_jax.errors import InputError


class Heard:
    def __init__(self):
        self.records = []
        self.closed = False

    def write(self, step, record):
        self.records.append((step, record))

    def close(self):
        self.closed = True


RECORD = {"loss": 1.5, "step_seconds": 2.0, "tokens_per_second": 512.0, "input_wait": 0.0}


def test_what_is_not_finite_is_null_in_the_files():
    line = as_json(3, {"loss": float("nan"), "norm": float("inf"), "lr": 0.5})
    assert json.loads(line) == {"step": 3, "loss": None, "norm": None, "lr": 0.5}
    assert "NaN" not in line


def test_a_record_goes_to_the_file_the_line_and_the_sinks(tmp_path, capsys):
    heard = Heard()
    log = MetricsLog(tmp_path, 10, 0, "wedlm", [heard])
    log.write(5, RECORD)
    log.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 5, **RECORD}
    said = capsys.readouterr().out
    assert said == "5 of 10 steps, loss 1.5, 512 tokens/s, 0:00 elapsed, 0:10 left\n"
    assert heard.records == [(5, RECORD)]
    assert heard.closed


def test_before_the_first_record_it_says_how_far_the_steps_are(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("wedlm_jax.host.progress.FIRST_LINE_S", 0.0)
    log = MetricsLog(tmp_path, 10, 0, "wedlm")
    log.step(1)
    log.expect(5)
    log.write(5, RECORD)
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert first == "1 of 10 steps, losses come after step 5, 0 s so far"
    assert second.startswith("5 of 10 steps, loss 1.5, ")


def test_the_line_has_the_epochs_of_the_sources(tmp_path, capsys):
    log = MetricsLog(tmp_path, 10, 0, "wedlm")
    log.write(5, {**RECORD, "epoch/a": 0.5, "epoch/b": 3.004, "epoch/c": 2.0})
    log.write(6, {**RECORD, "epoch": 1.25})
    log.close()
    first, second = capsys.readouterr().out.splitlines()
    assert "loss 1.5, epochs 0.50 to 3.00, 512 tokens/s" in first
    assert "loss 1.5, epoch 1.25, 512 tokens/s" in second


def test_an_evaluation_goes_to_its_file_and_by_its_own_names_to_the_sinks(tmp_path):
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


@pytest.mark.parametrize(
    ("section", "module"),
    [(MetricsSection(tensorboard=True), "tensorboardX"), (MetricsSection(wandb="mine"), "wandb")],
)
def test_a_board_that_is_not_installed_is_refused_before_anything_is_made(
    tmp_path, monkeypatch, section, module
):
    monkeypatch.setitem(sys.modules, module, None)
    config = tiny_recipe(tmp_path / "run", tmp_path / "no tokenizer", metrics=section)
    with pytest.raises(InputError, match=rf"metrics\.{module.lower()[:5]}.* needs {module}: pip"):
        run_training(config)
    assert not (tmp_path / "run").exists()


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
