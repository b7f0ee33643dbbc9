"""The table of compiled steps goes on where it was stopped, and says what did not fit."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.train.test_compile_only import STEP
from train import compile_table
from train.compile_table import CELLS, LENGTHS, PODS, Cell, main, read, tables
from train.config import load_config

FIGURES = dataclasses.asdict(STEP)
CONFIGS = Path(__file__).parents[2] / "configs"


def test_every_cell_is_a_recipe_with_the_tokens_it_says() -> None:
    for cell in CELLS:
        config = load_config(CONFIGS / f"{cell.recipe}.yaml", cell.overrides)
        assert config.rows * config.accumulation * config.row_length == cell.tokens
        assert config.mesh.data == cell.data
    assert {cell.tokens for cell in LENGTHS} == {512 * 4096}
    assert len(set(CELLS)) == len(CELLS)


def test_a_stopped_table_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 2

    def run(cell: Cell, configs: Path) -> dict[str, Any]:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        return FIGURES

    monkeypatch.setattr(compile_table, "run", run)
    monkeypatch.setattr(compile_table, "CELLS", CELLS[:3])
    output = tmp_path / "cells.jsonl"
    with pytest.raises(KeyboardInterrupt):
        main(["--output", str(output)])
    # The last line was being written.
    output.write_text(output.read_text() + '{"cell": {"reci', encoding="utf-8")
    assert list(read(output)) == CELLS[:2]
    left = 1
    assert main(["--output", str(output)]) == 0
    assert list(read(output)) == CELLS[:3]
    assert main(["--output", str(output)]) == 0


def test_tables_hold_what_is_done_and_why_others_failed() -> None:
    text = tables({PODS[0]: FIGURES, PODS[1]: {"error": "it does not fit"}, LENGTHS[2]: FIGURES})
    pods, lengths = text.split("\n\n")
    assert "| wedlm_8b | v5p:4x4x4 | fsdp 4 | 512 × 1 | 90.0 of 100 GiB | 10% |" in pods
    assert "2.00 s (compute)" in pods
    assert "it does not fit" in pods
    assert "| 4,096 | 512 |" in lengths
    assert "| 8,192 | 256 |" in lengths
