"""Ctrl-C while the step is compiled ends a run at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.interrupted import interrupted
from tests.examples.tiny_run import tiny_recipe, write_recipe


@pytest.mark.full
def test_a_run_ends_and_says_where_it_goes_on(tmp_path: Path) -> None:
    recipe = write_recipe(tiny_recipe(tmp_path / "run", None), tmp_path)
    status, said = interrupted(tmp_path, "step", "train", "--config", str(recipe))
    assert status == 130, said
    assert said.splitlines()[-1] == (
        "wedlm train: interrupted while compiling; the same command goes on from the newest state"
    )
    assert not list((tmp_path / "run").glob("checkpoints/*"))
