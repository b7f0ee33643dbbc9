"""Hugging Face folders: round trips, shards, and folders that appear whole."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import (
    assert_same_bits,
    edit_config,
    every_float16_pattern,
    hf_values,
    set_tensors,
    tiny_config,
    tiny_model,
    write_tiny,
)
from wedlm_jax.checkpoint import hf_export
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.checkpoint.names import parameter_entries
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import replacing
from wedlm_jax.model import Transformer

STYLES = {
    "qwen3_untied": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen2": {"qk_norm": False, "attention_bias": True, "model_type": "qwen2"},
    "llama": {
        "qk_norm": False,
        "attention_bias": True,
        "mlp_bias": True,
        "model_type": "llama",
        "head_dim": 4,
    },
    "all": dict.fromkeys(PARTS, True),
}


def arrays(model: Transformer) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in arrays_from_model(model).items()}


# --- the table ---------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_table_covers_the_model_once(style: str) -> None:
    config = tiny_config(**STYLES[style])
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0)))
    entries = parameter_entries(config)
    assert {e.path: e.shape for e in entries} == {
        path: leaf.shape for path, leaf in arrays_from_model(model).items()
    }
    names = [name for e in entries for name in e.hf_names]
    assert len(set(names)) == len(names)
    total = sum(int(np.prod(e.hf_shape)) * len(e.hf_names) for e in entries)
    assert total == config.num_parameters()


def test_shapes_are_those_of_hugging_face(tmp_path: Path) -> None:
    tensors = hf_values(write_tiny(tmp_path / "m", attention_bias=True))
    layer = "model.layers.2."
    assert tensors["model.embed_tokens.weight"].shape == (24, 16)
    assert tensors["lm_head.weight"].shape == (24, 16)
    assert tensors[layer + "self_attn.q_proj.weight"].shape == (24, 16)  # [heads * head_dim, D]
    assert tensors[layer + "self_attn.k_proj.weight"].shape == (12, 16)
    assert tensors[layer + "self_attn.k_proj.bias"].shape == (12,)
    assert tensors[layer + "self_attn.q_norm.weight"].shape == (6,)
    assert tensors[layer + "mlp.down_proj.weight"].shape == (16, 12)


# --- round trips -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "dtype"),
    [
        ("qwen3_untied", "float16"),
        ("qwen3_tied", "bfloat16"),
        ("qwen2", "float32"),
        ("all", "bfloat16"),
        ("llama", "float32"),
    ],
)
def test_round_trip_is_bit_exact(tmp_path: Path, style: str, dtype: str) -> None:
    folder = write_tiny(tmp_path / "a", dtype=dtype, **STYLES[style])
    model = load_checkpoint(folder)
    assert_same_bits(arrays(model), arrays(tiny_model(model.config, dtype)))
    save_checkpoint(model, model.config, tmp_path / "b")
    assert_same_bits(hf_values(folder), hf_values(tmp_path / "b"))
    assert load_checkpoint(tmp_path / "b").config == model.config == tiny_config(**STYLES[style])
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_strange_bit_patterns_survive(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny(tmp_path / "a", dtype=dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    set_tensors(folder, **{name: every_float16_pattern(12 * 16, dtype).reshape(12, 16)})
    model = load_checkpoint(folder)
    save_checkpoint(model, model.config, tmp_path / "b")
    assert_same_bits(hf_values(folder), hf_values(tmp_path / "b"))


def test_shards_and_their_index(tmp_path: Path) -> None:
    whole = write_tiny(tmp_path / "whole")
    sharded = write_tiny(tmp_path / "sharded", shard_bytes=4000)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    tensors = hf_values(sharded)
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in tensors.values())
    largest = max(x.nbytes for x in tensors.values())
    assert all((sharded / f).stat().st_size < max(4000, largest) + 3000 for f in files)
    assert_same_bits(hf_values(whole), tensors)
    assert_same_bits(arrays(load_checkpoint(whole)), arrays(load_checkpoint(sharded)))


def test_dtype_casts_both_ways(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    values = hf_values(folder)
    model = load_checkpoint(folder, dtype=jnp.bfloat16)
    assert {str(x.dtype) for x in arrays(model).values()} == {"bfloat16"}
    save_checkpoint(load_checkpoint(folder), model.config, tmp_path / "b", dtype="bfloat16")
    expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in values.items()}
    assert_same_bits(hf_values(tmp_path / "b"), expected)
    save_checkpoint(model, model.config, tmp_path / "c")
    assert_same_bits(hf_values(tmp_path / "c"), expected)


def test_layers_of_different_dtypes_lose_nothing(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", dtype="bfloat16")
    name = "model.layers.1.input_layernorm.weight"
    exact = np.float32([1 + 2**-20] * 16)
    set_tensors(folder, **{name: exact})
    scale = arrays(load_checkpoint(folder))["layers.input_layernorm.scale"]
    np.testing.assert_array_equal(scale[1], exact)


def test_tied_head_written_out_is_accepted(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", tie_word_embeddings=True)
    before = arrays(load_checkpoint(folder))
    head = hf_values(folder)["model.embed_tokens.weight"]
    set_tensors(folder, **{"lm_head.weight": head})
    assert_same_bits(arrays(load_checkpoint(folder)), before)


def test_wedlm_config_that_is_silent_is_told_by_the_tensors(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", attention_bias=True, qk_norm=False)
    edit_config(folder, remove="attention_bias")
    edit_config(folder, remove="qk_norm")
    config = load_checkpoint(folder).config
    assert (config.attention_bias, config.qk_norm) == (True, False)


def test_single_file_goes_before_an_index(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    (folder / "model.safetensors.index.json").write_text("stale")
    assert len(HFCheckpoint(folder).files) == 1


# --- writing -----------------------------------------------------------------------------


def test_unknown_dtype_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(InputError, match="'float8'"):
        save_checkpoint(tiny_model(config), config, tmp_path / "a", dtype="float8")
    assert list(tmp_path.iterdir()) == []


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    set_tensors(folder, **{"model.norm.weight": np.float32([1e5] * 16)})
    model = load_checkpoint(folder)
    with pytest.raises(InputError, match=r"'model\.norm\.weight' .* too large for float16"):
        save_checkpoint(model, model.config, tmp_path / "b", dtype="float16")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_folder_of_other_things_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years")
    config = tiny_config()
    with pytest.raises(InputError, match="not a checkpoint"):
        save_checkpoint(tiny_model(config), config, tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years"


def test_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    config = tiny_config()
    for target in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(InputError, match="a"):
            save_checkpoint(tiny_model(config), config, target)
    assert (tmp_path / "a").read_text() == "x"


def test_earlier_checkpoint_is_replaced_whole(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a", shard_bytes=4000)
    model = load_checkpoint(folder)
    save_checkpoint(model, model.config, folder, tokenizer_from=folder)
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_failure_while_writing_keeps_the_earlier_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "a")
    before = hf_values(folder)
    model = load_checkpoint(folder)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export, "write_safetensors", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(model, model.config, folder)
    assert_same_bits(hf_values(folder), before)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("renames", [0, 1])
def test_kill_at_a_rename_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """As after SIGKILL nothing is tidied up: the folder, or its old content, is still there,
    and the next call finds it."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x").write_text("old")
    done, real_rename = 0, os.rename

    class Killed(Exception):
        pass

    def rename(source: Path, target: Path) -> None:
        nonlocal done
        if done == renames:
            raise Killed
        done += 1
        real_rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr("wedlm_jax.host.atomic._recover", lambda *_: None)
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        patch.setattr(os, "rename", rename)
        with pytest.raises(Killed), replacing(folder) as beside:
            (beside / "x").write_text("new")
    assert (folder.exists(), done) == (renames == 0, renames)
    contents = {path.read_text() for path in tmp_path.rglob("x")}
    assert contents == {"old", "new"}
    with pytest.raises(Killed), replacing(folder):
        raise Killed
    assert (folder / "x").read_text() == "old"
    with replacing(folder) as beside:
        (beside / "x").write_text("newest")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (folder / "x").read_text() == "newest"


def test_tokenizer_from_nowhere_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    with pytest.raises(InputError, match="tokenizer"):
        save_checkpoint(
            tiny_model(config), config, tmp_path / "a", tokenizer_from=tmp_path / "none"
        )
    assert list(tmp_path.iterdir()) == []
