"""Checkpoints onto devices, in every layout: the same bits, each read once, no more in memory than
needed."""

import dataclasses
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import (
    assert_same_bits,
    hf_values,
    model_arrays,
    set_tensors,
    tiny_config,
    tiny_model,
    write_tiny,
)
from wedlm_jax.checkpoint import model as loading
from wedlm_jax.checkpoint import safetensors
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.model import (
    load_checkpoint,
    parameter_sharding,
    read_parameter,
    read_slices,
    rows_first,
)
from wedlm_jax.checkpoint.names import arrays_from_model, check_tensors, parameter_entries
from wedlm_jax.checkpoint.safetensors import SafetensorsFile
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.quantization import ROUNDED, quantize_weights
from wedlm_jax.sharding import make_mesh, tree_shardings

LAYOUTS = {"stacked": {"stacked": True}, "apart": {"stacked": False}}
MESHES = {
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp over tensor": {"fsdp": 4, "tensor": 2},
    "sequence": {"fsdp": 4, "sequence": 2},
}
EVERY_PART = dict.fromkeys(PARTS, True)

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


def folder_of(path, tied=False):
    """A checkpoint in several files, with every kind of parameter."""
    options = {"tie_word_embeddings": tied, **EVERY_PART}
    return write_tiny(path / "a", dtype="bfloat16", shard_bytes=2000, **options)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def read(request, tmp_path_factory):
    """A folder, and the model that was written to it."""
    folder = folder_of(tmp_path_factory.mktemp("checkpoint"), request.param)
    config = tiny_config(tie_word_embeddings=request.param, **EVERY_PART)
    return folder, tiny_model(config, "bfloat16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def bytes_read(monkeypatch):
    """Returns the bytes of each read of tensor values."""
    sizes = []
    fill = SafetensorsFile._fill

    def counting(self, values, offset):
        sizes.append(values.nbytes)
        fill(self, values, offset)

    monkeypatch.setattr(SafetensorsFile, "_fill", counting)
    return sizes


def in_layout(model, layout):
    return model if layout["stacked"] else with_layers_apart(model)


def assert_placed(model, mesh):
    state = nnx.state(model)
    wanted = jax.tree.leaves(tree_shardings(mesh, state))
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, leaf.sharding)


@pytest.mark.parametrize("tied", [False, True])
@each_layout
def test_the_table_covers_the_model_once_in_each_layout(layout, tied):
    config = tiny_config(tie_word_embeddings=tied, **EVERY_PART)
    model = nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0), **layout))
    entries = parameter_entries(config, **layout)
    found = {path: leaf.shape for path, leaf in arrays_from_model(model).items()}
    assert {entry.path: entry.shape for entry in entries} == found
    assert all(entry.stacked == (len(entry.hf_names) > 1) for entry in entries)
    tensors = [(name, entry.hf_shape) for entry in entries for name in entry.hf_names]
    stacked = [(n, entry.hf_shape) for entry in parameter_entries(config) for n in entry.hf_names]
    assert sorted(tensors) == sorted(stacked)
    assert len(dict(tensors)) == len(tensors)
    assert sum(int(np.prod(shape)) for _, shape in tensors) == config.num_parameters()


@each_layout
def test_on_one_device_as_taken_apart(read, layout, bytes_read):
    folder, stacked = read
    model = load_checkpoint(folder, **layout)
    assert sum(bytes_read) == sum(x.nbytes for x in hf_values(folder).values())
    assert_same_bits(model_arrays(model), model_arrays(in_layout(stacked, layout)))


@pytest.mark.parametrize("hosts", [False, True], ids=["one host", "several hosts"])
@each_mesh
@each_layout
def test_on_a_mesh_the_same_and_each_byte_is_read_once(
    folder, layout, sizes, hosts, bytes_read, monkeypatch
):
    """Where a mesh spans processes each reads its own rows and the devices exchange the rest; here
    the devices are those of one."""
    mesh = make_mesh(sizes)
    expected = model_arrays(load_checkpoint(folder, **layout))
    bytes_read.clear()
    if hosts:
        monkeypatch.setattr(loading, "spans_processes", lambda mesh: True)
    model = load_checkpoint(folder, mesh=mesh, **layout)
    assert sum(bytes_read) == sum(x.nbytes for x in hf_values(folder).values())
    assert_same_bits(model_arrays(model), expected)
    assert_placed(model, mesh)


@each_mesh
@pytest.mark.parametrize("number", [0, 3])
def test_a_host_reads_its_own_rows_alone(folder, sizes, number, bytes_read):
    """A host with one of eight devices: no device's rows are another's, so that eight hosts read
    the file once; those that cannot be cut are read by all."""
    checkpoint, mesh = HFCheckpoint(folder), make_mesh(sizes)
    for entry in parameter_entries(checkpoint.config):
        sharding = rows_first(parameter_sharding(mesh, entry), entry)
        index = sharding.devices_indices_map(entry.shape)[jax.devices()[number]]
        spans = tuple(axis.indices(size)[:2] for axis, size in zip(index, entry.shape, strict=True))
        bytes_read.clear()
        [values] = read_slices(checkpoint, entry, None, [spans]).values()
        assert sum(bytes_read) == values.nbytes
        whole = read_parameter(checkpoint, entry)
        assert values.tobytes() == whole[tuple(slice(*span) for span in spans)].tobytes()
        if len(entry.hf_shape) == 2 and entry.hf_shape[0] % 8 == 0:
            assert values.size == whole.size // 8, entry.path


def test_cut_columns_are_read_in_as_few_reads_as_whole_ones(folder, bytes_read, monkeypatch):
    """Once for every tensor that fits a buffer, however many devices share its columns."""
    values = hf_values(folder).values()
    load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))
    assert len(bytes_read) == len(values)
    bytes_read.clear()
    monkeypatch.setattr(safetensors, "BUFFER_BYTES", 256)
    load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))
    # A buffer holds at least half of its size in whole rows, but for what is left at the end.
    assert len(bytes_read) <= sum(1 + 2 * value.nbytes // 256 for value in values)


# --- dtypes and rounding -----------------------------------------------------------------


def test_layers_of_different_dtypes_lose_nothing(tmp_path):
    folder = write_tiny(tmp_path / "a", dtype="bfloat16")
    exact = np.float32([1 + 2**-20] * 16)
    set_tensors(folder, **{"model.layers.1.input_layernorm.weight": exact})
    scale = model_arrays(load_checkpoint(folder))["layers.input_layernorm.scale"]
    np.testing.assert_array_equal(scale[1], exact)


@pytest.mark.parametrize("sizes", [None, *MESHES.values()], ids=["alone", *MESHES])
@each_layout
def test_rounded_while_read_as_rounded_behind(folder, layout, sizes):
    stacked = quantize_weights(load_checkpoint(folder, dtype="float32"))
    mesh = None if sizes is None else make_mesh(sizes)
    model = load_checkpoint(folder, dtype="float32", quantization="int8", mesh=mesh, **layout)
    assert_same_bits(model_arrays(model), model_arrays(in_layout(stacked, layout)))
    kinds = {path: value.dtype for path, value in model_arrays(model).items()}
    rounded = [path for path, kind in kinds.items() if kind == np.int8]
    assert rounded
    assert rounded == [path for path in kinds if path.endswith(".qvalue")]
    if mesh is not None:
        assert_placed(model, mesh)


@pytest.mark.parametrize("sizes", [None, {"tensor": 2}], ids=["alone", "tensor"])
@each_layout
def test_one_matrix_at_most_is_there_unrounded(folder, layout, sizes, monkeypatch):
    seen = []
    read = loading.load_parameter

    def noted(checkpoint, entry, *rest):
        matrices = [value for name, value in seen if name in ROUNDED]
        assert all(ref() is None or ref().is_deleted() for ref in matrices)
        value = read(checkpoint, entry, *rest)
        seen.append((entry.path.rpartition(".")[2], weakref.ref(value)))
        return value

    monkeypatch.setattr(loading, "load_parameter", noted)
    mesh = None if sizes is None else make_mesh(sizes, jax.devices()[:2])
    load_checkpoint(folder, quantization="int8", mesh=mesh, **layout)
    assert sum(name in ROUNDED for name, _ in seen) > 7


def test_large_matrices_multiply_columns(folder, monkeypatch):
    def multiplies_columns(**options):
        model = load_checkpoint(folder, stacked=False, **options)
        return all(layer.mlp.up_proj.columns for layer in model.layers)

    assert not multiplies_columns()
    monkeypatch.setattr("wedlm_jax.model.layers.CACHED_BYTES", 16 * 12 * 2)
    assert not multiplies_columns()
    assert multiplies_columns(dtype=jnp.float32)
    assert not load_checkpoint(folder, dtype=jnp.float32).layers.mlp.up_proj.columns


# --- refusals ----------------------------------------------------------------------------


@each_layout
def test_a_missing_tensor_is_named_in_each_layout(folder, layout):
    checkpoint = HFCheckpoint(folder)
    checkpoint.config = dataclasses.replace(tiny_config(**EVERY_PART), num_hidden_layers=4)
    with pytest.raises(InputError, match=r"tensor 'model\.layers\.3\..* is missing"):
        check_tensors(checkpoint, **layout)


def test_mesh_that_does_not_divide_is_refused(folder):
    with pytest.raises(InputError, match=r"tensor 8.* does not divide parameter .* of shape \["):
        load_checkpoint(folder, mesh=make_mesh({"tensor": 8}))


def test_faults_are_told_before_values_are_read(tmp_path, monkeypatch):
    folder = write_tiny(tmp_path / "a")
    set_tensors(folder, **{"model.norm.weight": np.zeros(3, np.float32)})
    monkeypatch.setattr(SafetensorsFile, "_fill", None)
    with pytest.raises(InputError, match=r"'model\.norm\.weight' has shape \[3\], expected \[16\]"):
        load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))
    with pytest.raises(InputError, match="expected one of int8, not 'int3'"):
        load_checkpoint(tmp_path / "absent", quantization="int3")


def test_file_cut_while_it_is_read(tmp_path):
    checkpoint = HFCheckpoint(write_tiny(tmp_path / "a"))
    path = tmp_path / "a" / "model.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
    with pytest.raises(InputError, match=r"model\.safetensors: truncated while"):
        list(checkpoint.tensors.values())[-1].read()
