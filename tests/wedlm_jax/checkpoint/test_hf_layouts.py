"""Checkpoints read straight into layers that lie apart, and rounded while they are read."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import assert_same_bits, hf_values, tiny_config, write_tiny
from wedlm_jax.checkpoint import hf
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.checkpoint.names import parameter_entries
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import is_on_columns, with_layers_apart
from wedlm_jax.model.quantization import INPUT_AXES, quantize_weights
from wedlm_jax.sharding import make_mesh, tree_shardings

LAYOUTS = {
    "stacked": {"stacked": True},
    "rows": {"stacked": False, "columns": False},
    "columns": {"stacked": False, "columns": True},
}
MESHES = {"alone": None, "fsdp over tensor": {"fsdp": 4, "tensor": 2}, "tensor": {"tensor": 2}}

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
each_head = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


def folder_of(tmp_path: Path, tied: bool = False) -> Path:
    """A checkpoint in several files, with every kind of parameter."""
    options = {"tie_word_embeddings": tied, **dict.fromkeys(PARTS, True)}
    return write_tiny(tmp_path / "a", dtype="bfloat16", shard_bytes=2000, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def read(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple:
    """A folder, and what is read from it with stacked layers."""
    folder = folder_of(tmp_path_factory.mktemp("checkpoint"), request.param)
    return folder, load_checkpoint(folder)


@pytest.fixture(scope="module")
def read_and_rounded(tmp_path_factory: pytest.TempPathFactory) -> tuple:
    folder = folder_of(tmp_path_factory.mktemp("checkpoint"))
    return folder, quantize_weights(load_checkpoint(folder, dtype="float32"))


def on_devices(sizes: dict[str, int] | None) -> dict[str, Any]:
    if sizes is None:
        return {}
    count = int(np.prod(list(sizes.values())))
    return {"mesh": make_mesh(sizes, jax.devices()[:count])}


def in_layout(model: Transformer, layout: dict[str, bool]) -> Transformer:
    return model if layout["stacked"] else with_layers_apart(model, columns=layout["columns"])


def leaves(model: Transformer) -> dict[str, np.ndarray]:
    """Every array by its path, those of rounded matrices too."""
    return {path: np.asarray(value) for path, value in arrays_from_model(model).items()}


@each_head
@each_layout
def test_the_table_covers_the_model_in_each_layout(layout: dict, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, **dict.fromkeys(PARTS, True))
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), **layout))
    entries = parameter_entries(config, **layout)
    assert {e.path: e.shape for e in entries} == {
        path: leaf.shape for path, leaf in arrays_from_model(model).items()
    }
    assert all(entry.stacked == (len(entry.hf_names) > 1) for entry in entries)
    as_stacked = {
        (name, entry.hf_shape) for entry in parameter_entries(config) for name in entry.hf_names
    }
    assert {(name, entry.hf_shape) for entry in entries for name in entry.hf_names} == as_stacked


@each_mesh
@each_layout
def test_read_apart_as_taken_apart(read: tuple, layout: dict, sizes: dict | None) -> None:
    (folder, stacked), devices = read, on_devices(sizes)
    model = load_checkpoint(folder, **layout, **devices)
    assert_same_bits(leaves(model), leaves(in_layout(stacked, layout)))
    if sizes is not None:
        assert_placed(model, devices["mesh"])


def assert_placed(model: Transformer, mesh: jax.sharding.Mesh) -> None:
    state = nnx.state(model)
    wanted = jax.tree.leaves(tree_shardings(mesh, state))
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, leaf.sharding)


@each_mesh
@each_layout
def test_rounded_while_read_as_rounded_behind(
    read_and_rounded: tuple, layout: dict, sizes: dict | None
) -> None:
    (folder, stacked), devices = read_and_rounded, on_devices(sizes)
    model = load_checkpoint(folder, dtype="float32", quantization="int8", **layout, **devices)
    assert_same_bits(leaves(model), leaves(in_layout(stacked, layout)))
    kinds = {path: value.dtype for path, value in leaves(model).items()}
    assert (
        sum(kind == np.int8 for kind in kinds.values())
        == sum(path.endswith(".qvalue") for path in kinds)
        > 0
    )
    if sizes is not None:
        assert_placed(model, devices["mesh"])


@pytest.mark.parametrize("sizes", [None, {"tensor": 2}], ids=["alone", "tensor"])
@each_layout
def test_one_matrix_at_most_is_there_unrounded(
    tmp_path: Path, layout: dict, sizes: dict | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, seen = folder_of(tmp_path), []
    read = hf.load_parameter

    def noted(checkpoint: Any, entry: hf.Entry, *rest: Any) -> jax.Array:
        matrices = [value for name, value in seen if name in INPUT_AXES]
        assert all(ref() is None or ref().is_deleted() for ref in matrices)
        value = read(checkpoint, entry, *rest)
        seen.append((entry.path.rpartition(".")[2], weakref.ref(value)))
        return value

    monkeypatch.setattr(hf, "load_parameter", noted)
    load_checkpoint(folder, quantization="int8", **layout, **on_devices(sizes))
    assert sum(name in INPUT_AXES for name, _ in seen) > 7


@each_head
@each_layout
def test_written_from_each_layout_the_same(tmp_path: Path, layout: dict, tied: bool) -> None:
    folder = folder_of(tmp_path, tied)
    model = load_checkpoint(folder, **layout)
    save_checkpoint(model, model.config, tmp_path / "b")
    assert_same_bits(hf_values(tmp_path / "b"), hf_values(folder))


@each_layout
def test_rounded_matrices_are_not_written(tmp_path: Path, layout: dict) -> None:
    model = load_checkpoint(folder_of(tmp_path), quantization="int8", **layout)
    with pytest.raises(InputError, match="matrices are rounded"):
        save_checkpoint(model, model.config, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_an_unknown_quantization_is_told_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="expected one of int8, not 'int3'"):
        load_checkpoint(tmp_path / "absent", quantization="int3")


def test_the_layout_goes_by_the_size_of_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path)
    assert not is_on_columns(load_checkpoint(folder, stacked=False))
    matrix = 16 * 12 * 2
    monkeypatch.setattr("wedlm_jax.model.layers.CACHED_BYTES", matrix)
    assert not is_on_columns(load_checkpoint(folder, stacked=False))
    assert is_on_columns(load_checkpoint(folder, stacked=False, dtype=jnp.float32))
    assert not is_on_columns(load_checkpoint(folder, stacked=True, dtype=jnp.float32))


def test_a_missing_tensor_is_named_in_each_layout(tmp_path: Path) -> None:
    config = dataclasses.replace(tiny_config(), num_hidden_layers=4)
    folder = folder_of(tmp_path)
    checkpoint = HFCheckpoint(folder)
    checkpoint.config = config
    for layout in LAYOUTS.values():
        with pytest.raises(InputError, match=r"tensor 'model\.layers\.3\..* is missing"):
            hf.check_tensors(checkpoint, **layout)
