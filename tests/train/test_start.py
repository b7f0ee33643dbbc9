"""What a run starts from: a checkpoint of the architecture that the recipe states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_checkpoint
from train.start import _check_architecture
from wedlm_jax.errors import InputError


def test_a_recipe_for_another_model_is_refused_before_a_weight_is_read(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    same = {"hidden_size": raw["hidden_size"], "qk_norm": True, "model_type": "wedlm"}
    _check_architecture(same, folder)
    _check_architecture({}, folder)
    with pytest.raises(InputError, match=r"hidden_size is 4096 in the recipe, and \d+ in "):
        _check_architecture({**same, "hidden_size": 4096}, folder)
