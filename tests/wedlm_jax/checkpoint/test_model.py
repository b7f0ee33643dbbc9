"""Checkpoints onto devices and into files, in every layout and from every mesh: the same bits, each
read once, no more in memory than needed; a folder is written whole or not at all."""

import json
import os
import shutil
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.examples.checkpoints import (
    assert_placed,
    assert_same_bits,
    every_float16_pattern,
    hf_values,
    model_arrays,
    refused,
    set_tensors,
    tiny_config,
    write_tiny,
)
from tests.examples.child import run_python
from tests.examples.tiny_run import free_port
from wedlm_jax.checkpoint import hf, safetensors
from wedlm_jax.checkpoint import model as loading
from wedlm_jax.checkpoint.hf import HFCheckpoint, write_weights
from wedlm_jax.checkpoint.model import (
    load_checkpoint,
    parameter_sharding,
    read_parameter,
    read_slices,
    rows_first,
    save_checkpoint,
)
from wedlm_jax.checkpoint.names import parameter_entries
from wedlm_jax.checkpoint.safetensors import DeferredArray, SafetensorsFile
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import replacing
from wedlm_jax.host.processes import Processes
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.quantization import ROUNDED, quantize_weights
from wedlm_jax.sharding import make_mesh

LAYOUTS = {"stacked": {"stacked": True}, "apart": {"stacked": False}}
MESHES = {
    "tensor": {"data": 2, "tensor": 4},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "sequence": {"fsdp": 4, "sequence": 2},
}
EVERY_PART = dict.fromkeys(PARTS, True)

each_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
each_mesh = pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint in several files, with every kind of parameter."""
    folder = tmp_path_factory.mktemp("checkpoint") / "a"
    return write_tiny(folder, dtype="bfloat16", shard_bytes=2000, **EVERY_PART)


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


@pytest.mark.parametrize("hosts", [False, True])
@each_layout
@each_mesh
def test_onto_a_mesh_each_byte_is_read_once_and_from_there_all_is_written(
    folder, tmp_path, layout, sizes, hosts, bytes_read, monkeypatch
):
    """Where a mesh spans processes each reads its own rows and the devices exchange the rest; here
    the devices are those of one."""
    mesh, size = make_mesh(sizes), sum(x.nbytes for x in hf_values(folder).values())
    expected = model_arrays(load_checkpoint(folder, **layout))
    assert sum(bytes_read) == size
    bytes_read.clear()
    if hosts:
        monkeypatch.setattr(loading, "spans_processes", lambda mesh: True)
    model = load_checkpoint(folder, mesh=mesh, **layout)
    assert sum(bytes_read) == size
    assert_same_bits(model_arrays(model), expected)
    assert_placed(model, mesh)
    save_checkpoint(model, model.config, tmp_path / "b", shard_bytes=2000)
    written = {path.name: path.read_bytes() for path in (tmp_path / "b").iterdir()}
    read = [path for path in folder.iterdir() if "tokenizer" not in path.name]
    assert written == {path.name: path.read_bytes() for path in read}


@each_mesh
def test_a_host_reads_its_own_rows_alone(folder, sizes, bytes_read):
    """A host with one of eight devices: no device's rows are another's, so that eight hosts read
    the file once; those that cannot be cut are read by all."""
    checkpoint, mesh = HFCheckpoint(folder), make_mesh(sizes)
    for entry in parameter_entries(checkpoint.config):
        sharding = rows_first(parameter_sharding(mesh, entry), entry)
        index = sharding.devices_indices_map(entry.shape)[jax.devices()[3]]
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


@pytest.mark.parametrize("sizes", [None, MESHES["mixed"]], ids=["alone", "mixed"])
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


@pytest.mark.parametrize(
    ("layout", "sizes"), [(LAYOUTS["stacked"], {"tensor": 2}), (LAYOUTS["apart"], None)]
)
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


# --- written ---------------------------------------------------------------------------------

STYLES = {
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen2": {"qk_norm": False, "attention_bias": True, "model_type": "qwen2"},
    "llama": {"qk_norm": False, "mlp_bias": True, "model_type": "llama", "head_dim": 4},
    "all": EVERY_PART,
}


@pytest.fixture(scope="module")
def model(folder):
    return load_checkpoint(folder)


@pytest.mark.parametrize(
    ("style", "dtype", "layout"),
    [
        ("qwen3", "float16", "apart"),
        ("qwen3_tied", "bfloat16", "stacked"),
        ("qwen2", "float32", "apart"),
        ("llama", "float16", "stacked"),
        ("all", "bfloat16", "apart"),
    ],
)
def test_round_trip_is_bit_exact(tmp_path, style, dtype, layout):
    folder = write_tiny(tmp_path / "a", dtype=dtype, **STYLES[style])
    if dtype != "float32":  # subnormals, −0, infinities and NaN payloads as well
        pattern = every_float16_pattern(12 * 16, dtype).reshape(12, 16)
        set_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": pattern})
    model = load_checkpoint(folder, **LAYOUTS[layout])
    save_checkpoint(model, model.config, tmp_path / "b")
    assert_same_bits(hf_values(folder), hf_values(tmp_path / "b"))
    assert load_checkpoint(tmp_path / "b").config == model.config == tiny_config(**STYLES[style])
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == dtype
    assert sum(x.size for x in hf_values(folder).values()) == model.config.num_parameters()


def test_dtype_casts_both_ways(tmp_path):
    folder = write_tiny(tmp_path / "a")
    expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in hf_values(folder).items()}
    model = load_checkpoint(folder, dtype=jnp.bfloat16)
    assert {str(x.dtype) for x in model_arrays(model).values()} == {"bfloat16"}
    save_checkpoint(load_checkpoint(folder), model.config, tmp_path / "b", dtype="bfloat16")
    save_checkpoint(model, model.config, tmp_path / "c")
    for written in ("b", "c"):
        assert_same_bits(hf_values(tmp_path / written), expected)


def test_shards_and_their_index_are_written_with_one_tensor_at_a_time_in_memory(tmp_path):
    seen = []

    def read():
        assert not any(ref() is not None for ref in seen)
        values = np.ones((40, 30), np.float32)
        seen.append(weakref.ref(values))
        return values

    dtype = np.dtype(np.float16)
    tensors = [DeferredArray(f"t{i}", (40, 30), dtype, read) for i in range(6)]
    write_weights(tensors, tmp_path, shard_bytes=2 * 40 * 30 * 2)
    assert len(seen) == 6
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert json.loads((tmp_path / hf.INDEX).read_text()) == {
        "metadata": {"total_size": 6 * 40 * 30 * 2},
        "weight_map": {f"t{i}": files[i // 2] for i in range(6)},
    }
    assert {x.sum() for x in hf_values(tmp_path).values()} == {1200}


# --- what stays --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "made", "message"),
    [
        ({"dtype": "float8"}, {}, "'float8'"),
        ({"tokenizer_from": "no/such"}, {}, "no/such: no such folder to take the tokenizer from"),
        ({}, {"b/thesis.txt": "years"}, "not a checkpoint that could be replaced"),
        ({}, {"b": "years"}, "b"),
    ],
)
def test_what_is_refused_leaves_all_as_it_was(tmp_path, model, options, made, message):
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    target = tmp_path / "b"
    with refused(message):
        save_checkpoint(model, model.config, target, **options)
    if made == {"b": "years"}:
        with refused("b"):
            save_checkpoint(model, model.config, target / "c", **options)
    found = {
        str(p.relative_to(tmp_path)): p.read_text() for p in tmp_path.rglob("*") if p.is_file()
    }
    assert found == made


def test_rounded_matrices_are_not_written(folder, tmp_path):
    for layout in LAYOUTS.values():
        model = load_checkpoint(folder, quantization="int8", **layout)
        with pytest.raises(InputError, match="model is quantized"):
            save_checkpoint(model, model.config, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("renames", [0, 1])
def test_kill_at_a_rename_loses_nothing(tmp_path, monkeypatch, renames):
    """As after SIGKILL nothing is tidied up: the folder, or its old content, is still there,
    and the next call finds it."""
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "x").write_text("old")
    done, real_rename = 0, os.rename

    class Killed(Exception):
        pass

    def rename(source, target):
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
    assert {path.read_text() for path in tmp_path.rglob("x")} == {"old", "new"}
    with pytest.raises(Killed), replacing(folder):
        raise Killed
    assert (folder / "x").read_text() == "old"
    with replacing(folder) as beside:
        (beside / "x").write_text("newest")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (folder / "x").read_text() == "newest"


# --- several processes -------------------------------------------------------------------


def together(count, model, folder):
    """`save_checkpoint` by so many processes, which here are threads that share the model."""
    barrier, answers = threading.Barrier(count), [False] * count

    def one(index):
        def all_true(mine):
            answers[index] = mine
            barrier.wait(60)
            result = all(answers)
            barrier.wait(60)
            return result

        try:
            processes = Processes(index, count, all_true)
            save_checkpoint(model, model.config, folder, shard_bytes=2000, processes=processes)
        except Exception as error:
            return error
        assert (folder / "config.json").exists()  # nobody goes on before it is there
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_processes_share_the_files(folder, model, tmp_path, monkeypatch):
    writers = {}
    write = hf.write_safetensors

    def noted(path, *rest):
        writers[path.name] = threading.get_ident()
        write(path, *rest)

    monkeypatch.setattr(hf, "write_safetensors", noted)
    assert together(3, model, tmp_path / "b") == [None] * 3
    assert len(set(writers.values())) == 3
    assert_same_bits(hf_values(tmp_path / "b"), hf_values(folder))
    assert load_checkpoint(tmp_path / "b").config == model.config
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("broken", ["model-00001", "model-00002"])
@pytest.mark.parametrize("count", [1, 2])
def test_nobody_waits_for_a_process_that_fails(model, tmp_path, monkeypatch, broken, count):
    """All of them end, the earlier checkpoint stands, and the fault is told by its own."""
    save_checkpoint(model, model.config, tmp_path / "b")
    before = hf_values(tmp_path / "b")
    write = hf.write_safetensors

    def full(path, *rest):
        if path.name.startswith(broken):
            raise OSError(28, "No space left on device")
        write(path, *rest)

    monkeypatch.setattr(hf, "write_safetensors", full)
    told = [str(error) for error in together(count, model, tmp_path / "b")]
    assert sum("No space left on device" in text for text in told) == 1
    assert sum("another process of the job failed" in text for text in told) == count - 1
    assert_same_bits(hf_values(tmp_path / "b"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.full
def test_two_processes_write_one_checkpoint(tmp_path):
    """Two real ones, with two devices each, from a mesh over both."""
    source, back = write_tiny(tmp_path / "a", dtype="bfloat16", shard_bytes=8000), tmp_path / "b"
    (tmp_path / "c").write_text("x")
    command, port = ("-m", "tests.hf_process"), free_port()
    on_cpu = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with ThreadPoolExecutor(2) as pool:
        started = [
            pool.submit(run_python, *command, i, port, source, back, tmp_path / "c", env=on_cpu)
            for i in range(2)
        ]
    ended = [one.result() for one in started]
    assert_same_bits(hf_values(back), hf_values(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    # And where they cannot, both say so and end.
    told, heard = (one.stderr for one in ended)
    assert [one.returncode for one in ended] == [1, 1], told + heard
    assert "is a file" in told
    assert "another process of the job failed" in heard
