"""Boards: what they are sent, and what is refused before anything is loaded."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tests.examples.tiny_run import tiny_recipe
from train.loop import train as run_training
from train.recipe.config import MetricsSection
from train.watch.boards import TensorBoard, Wandb, run_id
from wedlm_jax.errors import InputError

RECORD = {"loss": 1.5, "tokens_per_second": 512.0}


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


@pytest.mark.parametrize(
    ("section", "module"),
    [(MetricsSection(tensorboard=True), "tensorboardX"), (MetricsSection(wandb="mine"), "wandb")],
)
def test_a_board_that_is_not_installed_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, section: MetricsSection, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    config = tiny_recipe(tmp_path / "run", tmp_path / "no tokenizer", metrics=section)
    with pytest.raises(InputError, match=rf"metrics\.{module.lower()[:5]}.* needs {module}: pip"):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_two_runs_of_one_name_are_two_runs_at_wandb_and_a_restart_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[dict[str, Any]] = []
    fake: Any = types.ModuleType("wandb")
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
