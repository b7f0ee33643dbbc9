"""Hugging Face folders that cannot be read: one sentence, which names the folder and the fault."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.examples.checkpoints import edit_config, set_tensors, write_tiny
from wedlm_jax.checkpoint.hf import load_checkpoint
from wedlm_jax.errors import InputError


def refusal(folder: Path, *named: str) -> str:
    with pytest.raises(InputError) as error:
        load_checkpoint(folder)
    text = str(error.value)
    assert "\n" not in text
    assert "Traceback" not in text
    for part in (str(folder), *named):
        assert part in text
    return text


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "模型 é")


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def test_missing_tensor(folder: Path) -> None:
    set_tensors(folder, **{K_PROJ: None})
    refusal(folder, f"{K_PROJ!r} is missing")


def test_extra_tensor(folder: Path) -> None:
    set_tensors(folder, **{"model.layers.3.mlp.up_proj.weight": np.zeros(2, np.float32)})
    refusal(folder, "'model.layers.3.mlp.up_proj.weight' is not part of this model")


def test_misshapen_tensor(folder: Path) -> None:
    set_tensors(folder, **{K_PROJ: np.zeros((16, 12), np.float32)})
    refusal(folder, K_PROJ, "shape [16, 12], expected [12, 16]")


def test_untied_model_without_a_head(folder: Path) -> None:
    set_tensors(folder, **{"lm_head.weight": None})
    refusal(folder, "'lm_head.weight' is missing")


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refusal(folder, "model.safetensors", "truncated")


def test_weights_that_are_something_else(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(500))
    refusal(folder, "model.safetensors", "not a safetensors file")


def test_missing_folder_and_empty_folder(tmp_path: Path) -> None:
    refusal(tmp_path / "nothing", "no such model folder")
    refusal(tmp_path, "config.json", "no such file")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refusal(folder, "neither model.safetensors nor model.safetensors.index.json")
    (folder / "pytorch_model-00001-of-00002.bin").touch()
    refusal(folder, "only safetensors files are read")
    (folder / "orbax").mkdir()
    refusal(folder, "damaged or not an orbax checkpoint")


@pytest.mark.parametrize("content", ["{", "", "[1]", "\x00\xff", "null"])
def test_invalid_config(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refusal(folder, "config.json", "JSON")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gemma3"}, "'gemma3' is not supported"),
        ({"model_type": None}, "model_type None"),
        ({"use_sliding_window": True, "max_window_layers": 1}, "from layer 1 on"),
        ({"layer_types": ["full_attention", "full_attention", "sliding_attention"]}, "layer 2"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "'dynamic'"),
        ({"hidden_act": "gelu"}, 'hidden_act "gelu"'),
        ({"vocab_size": "24"}, ""),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"mask_token_id": 24}, "mask_token_id 24 lies outside"),
        ({"rms_norm_eps": "small"}, ""),
        ({"rope_scaling": "yarn"}, ""),
    ],
)
def test_config_that_cannot_be_served(folder: Path, changes: dict, named: str) -> None:
    edit_config(folder, **changes)
    refusal(folder, "config.json", named)


def test_config_with_a_field_missing(folder: Path) -> None:
    edit_config(folder, remove="num_hidden_layers")
    refusal(folder, "config.json", "'num_hidden_layers' is missing")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_tiny(tmp_path / "sharded", shard_bytes=4000)


def test_missing_shard(sharded: Path) -> None:
    (shard,) = sharded.glob("model-00002-of-*.safetensors")
    shard.unlink()
    refusal(sharded, shard.name, "no such file")


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_index_that_is_none(sharded: Path, content: str) -> None:
    (sharded / "model.safetensors.index.json").write_text(content)
    refusal(sharded, "model.safetensors.index.json")


def test_index_that_leaves_the_folder(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    refusal(sharded, "'a' is in no file of this folder")


def test_index_that_names_a_tensor_elsewhere(sharded: Path) -> None:
    path = sharded / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    files = index["weight_map"]
    files[K_PROJ] = next(f for f in sorted(set(files.values())) if f != files[K_PROJ])
    path.write_text(json.dumps(index))
    refusal(sharded, files[K_PROJ], f"{K_PROJ!r} is missing")
