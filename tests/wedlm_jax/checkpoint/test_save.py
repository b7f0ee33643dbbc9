"""Models as Hugging Face folders: from every layout and mesh the same bits, whole or not at all."""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.examples.checkpoints import (
    assert_same_bits,
    every_float16_pattern,
    hf_values,
    model_arrays,
    refused,
    set_tensors,
    tiny_config,
    write_tiny,
)
from tests.wedlm_jax.checkpoint.test_load import EVERY_PART, LAYOUTS, each_mesh, folder_of
from wedlm_jax.checkpoint import hf
from wedlm_jax.checkpoint.hf import plan_files, write_weights
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import replacing
from wedlm_jax.host.processes import Processes
from wedlm_jax.sharding import make_mesh

ROOT = Path(__file__).parents[3]
STYLES = {
    "qwen3": {},
    "qwen3_tied": {"tie_word_embeddings": True},
    "qwen2": {"qk_norm": False, "attention_bias": True, "model_type": "qwen2"},
    "llama": {"qk_norm": False, "mlp_bias": True, "model_type": "llama", "head_dim": 4},
    "all": EVERY_PART,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def model(folder):
    return load_checkpoint(folder)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("style", "dtype"), [*zip(STYLES, ("float16", "bfloat16", "float32") * 2, strict=False)]
)
def test_round_trip_is_bit_exact(tmp_path, style, dtype, layout):
    folder = write_tiny(tmp_path / "a", dtype=dtype, **STYLES[style])
    if dtype != "float32":  # subnormals, −0, infinities and NaN payloads as well
        pattern = every_float16_pattern(12 * 16, dtype).reshape(12, 16)
        set_tensors(folder, **{"model.layers.1.mlp.up_proj.weight": pattern})
    model = load_checkpoint(folder, **layout)
    save_checkpoint(model, model.config, tmp_path / "b")
    assert_same_bits(hf_values(folder), hf_values(tmp_path / "b"))
    assert load_checkpoint(tmp_path / "b").config == model.config == tiny_config(**STYLES[style])
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == dtype


@each_mesh
def test_from_a_mesh_as_from_one_device(folder, sizes, tmp_path):
    model = load_checkpoint(folder, mesh=make_mesh(sizes))
    save_checkpoint(model, model.config, tmp_path / "b", shard_bytes=2000)
    written = sorted(path.name for path in (tmp_path / "b").iterdir())
    assert written == sorted(x.name for x in folder.iterdir() if "tokenizer" not in x.name)
    for name in written:
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes(), name


def test_shards_and_their_index(tmp_path):
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
    assert_same_bits(*(model_arrays(load_checkpoint(folder)) for folder in (whole, sharded)))


def test_dtype_casts_both_ways(tmp_path):
    folder = write_tiny(tmp_path / "a")
    expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in hf_values(folder).items()}
    model = load_checkpoint(folder, dtype=jnp.bfloat16)
    assert {str(x.dtype) for x in model_arrays(model).values()} == {"bfloat16"}
    save_checkpoint(load_checkpoint(folder), model.config, tmp_path / "b", dtype="bfloat16")
    save_checkpoint(model, model.config, tmp_path / "c")
    for written in ("b", "c"):
        assert_same_bits(hf_values(tmp_path / written), expected)


def test_one_tensor_at_a_time_is_in_memory(tmp_path):
    seen = []

    def read():
        assert not any(ref() is not None for ref in seen)
        values = np.ones((40, 30), np.float32)
        seen.append(weakref.ref(values))
        return values

    dtype = np.dtype(np.float16)
    tensors = [DeferredArray(f"t{i}", (40, 30), dtype, read) for i in range(6)]
    write_weights(plan_files(tensors, 2 * 40 * 30 * 2), tmp_path)
    assert len(seen) == 6
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    assert {x.sum() for x in hf_values(tmp_path).values()} == {1200}


# --- what stays --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "made", "said"),
    [
        ({"dtype": "float8"}, {}, "'float8'"),
        ({"tokenizer_from": "no/such"}, {}, "no/such: no such folder to take the tokenizer from"),
        ({}, {"b/thesis.txt": "years"}, "not a checkpoint that could be replaced"),
        ({}, {"b": "years"}, "b"),
    ],
)
def test_what_is_refused_leaves_all_as_it_was(tmp_path, model, options, made, said):
    for name, content in made.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    target = tmp_path / "b"
    with refused(said):
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
        with pytest.raises(InputError, match="matrices are rounded"):
            save_checkpoint(model, model.config, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_earlier_checkpoint_is_replaced_whole(tmp_path):
    folder = write_tiny(tmp_path / "a", shard_bytes=4000)
    model = load_checkpoint(folder)
    save_checkpoint(model, model.config, folder, tokenizer_from=folder)
    names = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


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
    barrier, said = threading.Barrier(count), [False] * count

    def one(index):
        def all_true(mine):
            said[index] = mine
            barrier.wait(60)
            result = all(said)
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


def test_place_that_cannot_be_written_ends_all(model, tmp_path):
    (tmp_path / "b").write_text("x")
    errors = together(2, model, tmp_path / "b")
    assert all(isinstance(error, InputError) for error in errors)
    assert "is a file" in str(errors[0])
    assert (tmp_path / "b").read_text() == "x"


@pytest.mark.full
def test_two_processes_write_one_checkpoint(tmp_path):
    """Two real ones, with two devices each, from a mesh over both."""
    source, back = write_tiny(tmp_path / "a", dtype="bfloat16", shard_bytes=8000), tmp_path / "b"
    (tmp_path / "c").write_text("x")
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tests.hf_process"]
    options = {"cwd": ROOT, "env": {**os.environ, "JAX_PLATFORMS": "cpu"}, "text": True}
    children = [
        subprocess.Popen(
            [*command, str(i), str(port), source, back, tmp_path / "c"],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            **options,
        )
        for i in range(2)
    ]
    try:
        told, heard = (child.communicate(timeout=600)[1] for child in children)
    finally:
        for child in children:
            child.kill()
    assert_same_bits(hf_values(back), hf_values(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    # And where they cannot, both say so and end.
    assert [child.returncode for child in children] == [1, 1], told + heard
    assert "is a file" in told
    assert "another process of the job failed" in heard
