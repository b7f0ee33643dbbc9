"""`wedlm convert`: either way bit for bit, whole or not at all, one sentence for bad input."""

import json
import os
import shutil

import ml_dtypes
import numpy as np
import pytest

from tests.examples.checkpoints import (
    assert_same_bits,
    edit_json,
    every_float16_pattern,
    hf_values,
    refused,
    set_tensors,
    write_tiny,
)
from tests.examples.child import heavy_imports
from tests.examples.full_disk import small_disk
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.orbax import read_arrays, write_arrays
from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.config import PARTS
from wedlm_jax.errors import STORAGE_FAILED, StorageFailure

CARRIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


def assert_carried(source, destination):
    for name in CARRIED:
        assert (destination / name).read_bytes() == (source / name).read_bytes()


def config_of(folder):
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def refusal(source, destination, *named, **options):
    """The call is refused in one sentence, and the folder around is as it was."""
    around = sorted(destination.parent.rglob("*"))
    with refused(*named):
        convert(source, destination, **options)
    assert sorted(destination.parent.rglob("*")) == around


# --- values ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "dtype"),
    [
        ({"tie_word_embeddings": True}, "bfloat16"),
        ({"model_type": "qwen2", "qk_norm": False, "attention_bias": True}, "float32"),
        ({}, "float16"),
    ],
)
def test_round_trip_is_bit_exact(tmp_path, style, dtype):
    source = write_tiny(tmp_path / "模型", dtype=dtype, **style)
    if not style:
        pattern = every_float16_pattern(24 * 16, dtype).reshape(24, 16)
        zeros = np.zeros((24, 16), pattern.dtype)  # orbax leaves out what is zero, but not −0
        set_tensors(source, **{"model.embed_tokens.weight": pattern, "lm_head.weight": -zeros})
        for part in PARTS:  # the parameters tell what config.json does not say
            edit_json(source / "config.json", remove=part)
    there = convert(source, tmp_path / "deep" / "orbax")
    back = convert(tmp_path / "deep" / "orbax", tmp_path / "back")
    values = hf_values(source)
    assert_same_bits(hf_values(tmp_path / "back"), values)
    assert_carried(source, tmp_path / "back")
    assert (there.format, there.dtypes) == ("orbax", (dtype,))
    size = sum(x.nbytes for x in values.values())
    assert (back.format, back.tensors, back.bytes) == ("hf", len(values), size)


@pytest.mark.parametrize(("source", "to"), [(0, "hf"), (0, "orbax"), (1, "hf")])
def test_dtype_is_cast_and_named(pair, tmp_path, source, to):
    done = convert(pair[source], tmp_path / "b", to=to, dtype="bfloat16")
    assert (done.format, done.dtypes) == (to, ("bfloat16",))
    if to == "orbax":
        convert(tmp_path / "b", tmp_path / "c")
    written = tmp_path / ("b" if to == "hf" else "c")
    expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in hf_values(pair[0]).items()}
    assert_same_bits(hf_values(written), expected)
    assert config_of(written) == {**config_of(pair[0]), "dtype": "bfloat16"}


def test_config_json_changes_in_what_was_asked_for_alone(tmp_path):
    """The dtype under the name that the file uses; and no value changes with the model type."""
    hf, out = write_tiny(tmp_path / "hf"), tmp_path / "out"
    edit_json(hf / "config.json", remove="dtype", torch_dtype="float64")
    convert(hf, out, to="hf", model_type="qwen3", dtype="float32")
    changes = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    assert config_of(out) == {**config_of(hf), **changes, "torch_dtype": "float32"}
    assert (out / "model.safetensors").read_bytes() == (hf / "model.safetensors").read_bytes()


# --- bad input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "message", "options"),
    [
        (0, "is Hugging Face already", {"to": "hf"}),
        (1, "is orbax already", {"to": "orbax"}),
        (0, "--model-type qwen3: does not match this model", {"model_type": "qwen3"}),
        (0, "'gguf'", {"to": "gguf"}),
        (0, "'int8'", {"dtype": "int8"}),
    ],
)
def test_options_that_cannot_be(pair, tmp_path, source, message, options):
    refusal(pair[source], tmp_path / "out", message, **options)


def test_folders_inside_one_another(hf, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(hf)
    refusal(hf, hf, "are the same folder", force=True)
    refusal(hf, link, "are the same folder", force=True)
    refusal(hf, hf / "out", "lies inside the source folder")
    shutil.copy(hf / "config.json", tmp_path)
    refusal(hf, tmp_path, "contains the source", force=True)


def test_destination_in_use(hf, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("years")
    refusal(hf, out, "not empty", "--force")
    refusal(hf, out, "not a checkpoint", force=True)
    refusal(hf, out / "thesis.txt", "is a file")
    refusal(hf, out / "thesis.txt" / "x", "thesis.txt")
    assert (out / "thesis.txt").read_text() == "years"
    shutil.copy(hf / "config.json", out)
    refusal(hf, out, "not empty", "--force")
    convert(hf, out, force=True)
    assert sorted(path.name for path in out.iterdir()) == sorted([*CARRIED, "orbax"])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([hf.name, "out"])


def test_values_too_large_for_float16(hf, tmp_path):
    set_tensors(hf, **{"model.norm.weight": np.float32([7e4] * 16)})
    for to in ("hf", "orbax"):
        refusal(hf, tmp_path / "out", "'model.norm.weight'", "float16", to=to, dtype="float16")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("layers.mlp.up_proj.weight", None, "'model.layers.0.mlp.up_proj.weight' is missing"),
        ("layers.mlp.up_proj.bias", np.zeros(2), "'model.layers.0.mlp.up_proj.bias' is not part"),
        ("layers.mlp.extra", np.zeros(2), "'layers.mlp.extra' is not part of this model"),
    ],
)
def test_orbax_parameters_that_are_not_the_models(orbax, tmp_path, path, value, message):
    arrays = {**read_arrays(orbax / "orbax"), path: value}
    shutil.rmtree(orbax / "orbax")
    write_arrays(
        orbax / "orbax",
        [DeferredArray(p, x.shape, x.dtype, x.copy) for p, x in arrays.items() if x is not None],
    )
    refusal(orbax, tmp_path / "out", message)


# --- failures ----------------------------------------------------------------------------


def test_a_failure_at_the_end_leaves_the_destination(hf, tmp_path, monkeypatch):
    out = tmp_path / "out"
    convert(hf, out)
    before = read_arrays(out / "orbax")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wedlm_jax.checkpoint.convert.write_config", full)
    with pytest.raises(StorageFailure, match=r"out: cannot be written \(No space left on device\)"):
        convert(hf, out, dtype="bfloat16", force=True)
    assert_same_bits(read_arrays(out / "orbax"), before)


FULL_DISK = {"hf": ["--to", "hf", "--dtype", "float32"], "orbax": ["--to", "orbax"]}


@pytest.mark.parametrize("to", FULL_DISK)
def test_a_full_disk_is_no_bad_input(pair, tmp_path, to, capsys):
    with small_disk(tmp_path / "disk", 8 * 1024) as disk:
        arguments = ["convert", str(pair[0]), str(disk / "made"), *FULL_DISK[to]]
        assert main(arguments) == STORAGE_FAILED
        message = capsys.readouterr().err.splitlines()[-1]
        assert message.startswith(f"wedlm convert: {disk / 'made'}: cannot be written (")
        assert list(disk.iterdir()) == []


# --- the commands ------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [(None, "cpu"), ("cpu,tpu", "cpu,tpu")])
def test_command_leaves_accelerators_alone_and_tells_a_mistake_in_one_line(
    tmp_path, monkeypatch, capsys, given, expected
):
    monkeypatch.setenv("JAX_PLATFORMS", given or "")
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert os.environ["JAX_PLATFORMS"] == expected
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"wedlm convert: {tmp_path / 'no'}: no such folder\n"


def test_help_is_quick_and_teaches():
    """Neither JAX nor anything heavier is imported for it."""
    printed, heavy = heavy_imports("convert", "--help")
    assert "wedlm convert ./WeDLM-8B ./WeDLM-8B-orbax" in printed
    assert heavy == ["numpy"]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": False, "attention_bias": True}, "qwen2"),
        ({"qk_norm": False, "mlp_bias": True}, "llama"),
        ({"qk_norm": False, "attention_bias": True, "attention_out_bias": True}, "llama"),
    ],
)
def test_export_finds_the_family_that_fits_even_where_config_json_is_silent(tmp_path, fields, name):
    hf, out = write_tiny(tmp_path / "hf", **fields), tmp_path / "out"
    for part in PARTS:
        edit_json(hf / "config.json", remove=part)
    assert main(["export", str(hf), str(out)]) == 0
    assert config_of(out)["model_type"] == name
    config = HFCheckpoint(out).config
    assert {part for part in PARTS if getattr(config, part)} == {k for k, v in fields.items() if v}
