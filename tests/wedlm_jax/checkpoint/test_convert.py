"""`wedlm convert`: either way bit for bit, whole or not at all, one sentence for bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.examples.checkpoints import (
    assert_same_bits,
    edit_config,
    every_float16_pattern,
    hf_values,
    set_tensors,
    write_tiny,
)
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.export import main as export
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.checkpoint.orbax_io import read_arrays, write_arrays
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError, StorageFailure

ROOT = Path(__file__).parents[3]
CARRIED = ("config.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One checkpoint in both formats; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_tiny(folder / "hf", attention_bias=True)
    convert(source, folder / "orbax")
    return source, folder / "orbax"


@pytest.fixture
def hf(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[0], tmp_path / "hf"))


@pytest.fixture
def orbax(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "orbax"))


def assert_carried(source: Path, destination: Path) -> None:
    for name in CARRIED:
        assert (destination / name).read_bytes() == (source / name).read_bytes()


def refusal(source: Path, destination: Path, *named: str, **options: object) -> None:
    """The call is refused in one sentence, and the folder around is as it was."""
    around = sorted(destination.parent.rglob("*"))
    with pytest.raises(InputError) as error:
        convert(source, destination, **options)  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    for part in named:
        assert part in str(error.value)
    assert sorted(destination.parent.rglob("*")) == around


# --- values ------------------------------------------------------------------------------


def test_orbax_holds_our_parameters(pair: tuple[Path, Path]) -> None:
    source, written = pair
    expected = arrays_from_model(load_checkpoint(source))
    assert_same_bits(
        read_arrays(written / "orbax"), {path: np.asarray(x) for path, x in expected.items()}
    )
    assert_carried(source, written)
    assert not list(written.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("style", "dtype"),
    [
        ({"tie_word_embeddings": True}, "bfloat16"),
        ({"model_type": "qwen2", "qk_norm": False, "attention_bias": True}, "float32"),
        ({}, "float16"),
    ],
)
def test_round_trip_is_bit_exact(tmp_path: Path, style: dict, dtype: str) -> None:
    source = write_tiny(tmp_path / "模型", dtype=dtype, shard_bytes=4000, **style)
    there = convert(source, tmp_path / "deep" / "orbax")
    back = convert(tmp_path / "deep" / "orbax", tmp_path / "back")
    values = hf_values(source)
    assert_same_bits(hf_values(tmp_path / "back"), values)
    assert_carried(source, tmp_path / "back")
    assert (there.format, there.dtypes) == ("orbax", (dtype,))
    assert (back.format, back.tensors, back.bytes) == (
        "hf",
        len(values),
        sum(x.nbytes for x in values.values()),
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_strange_bit_patterns_survive(tmp_path: Path, dtype: str) -> None:
    source = write_tiny(tmp_path / "a", dtype=dtype)
    pattern = every_float16_pattern(24 * 16, dtype).reshape(24, 16)
    zeros = np.zeros((24, 16), pattern.dtype)  # orbax leaves out what is zero, but not −0
    set_tensors(source, **{"model.embed_tokens.weight": pattern, "lm_head.weight": -zeros})
    convert(source, tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c")
    assert_same_bits(hf_values(tmp_path / "c"), hf_values(source))


@pytest.mark.parametrize("silent", PARTS)
def test_config_that_is_silent_is_told_by_the_parameters(
    hf: Path, tmp_path: Path, silent: str
) -> None:
    edit_config(hf, remove=silent)
    convert(hf, tmp_path / "b")
    convert(tmp_path / "b", tmp_path / "c")
    assert_same_bits(hf_values(tmp_path / "c"), hf_values(hf))
    assert_carried(hf, tmp_path / "c")


@pytest.mark.parametrize("kind", ["hf", "orbax"])
@pytest.mark.parametrize("to", ["hf", "orbax"])
def test_dtype_is_cast_and_named(
    pair: tuple[Path, Path], tmp_path: Path, kind: str, to: str
) -> None:
    source = pair[0] if kind == "hf" else pair[1]
    done = convert(source, tmp_path / "b", to=to, dtype="bfloat16")
    assert (done.format, done.dtypes) == (to, ("bfloat16",))
    if to == "orbax":
        convert(tmp_path / "b", tmp_path / "c")
    written = tmp_path / ("b" if to == "hf" else "c")
    expected = {name: x.astype(ml_dtypes.bfloat16) for name, x in hf_values(pair[0]).items()}
    assert_same_bits(hf_values(written), expected)
    raw = json.loads((written / "config.json").read_text())
    assert raw == {**json.loads((pair[0] / "config.json").read_text()), "dtype": "bfloat16"}


def test_older_name_of_the_dtype_field_is_kept(hf: Path, tmp_path: Path) -> None:
    edit_config(hf, remove="dtype", torch_dtype="float32")
    convert(hf, tmp_path / "b", to="hf", dtype="float16")
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["torch_dtype"] == "float16"
    assert "dtype" not in raw


# --- bad input ---------------------------------------------------------------------------


def test_sources_that_are_no_checkpoint(hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (tmp_path / "empty").mkdir()
    (tmp_path / "states" / "100").mkdir(parents=True)
    (tmp_path / "states" / "100" / "_CHECKPOINT_METADATA").touch()
    (tmp_path / "both").mkdir()
    shutil.copy(hf / "model.safetensors", tmp_path / "both")
    (tmp_path / "both" / "orbax").mkdir()
    refusal(tmp_path / "none", out, "none", "no such folder")
    refusal(hf / "config.json", out, "config.json", "is a file")
    refusal(tmp_path / "empty", out, "neither a Hugging Face checkpoint", "nor an orbax one")
    refusal(tmp_path / "states", out, "the state of a training run")
    refusal(tmp_path / "both", out, "both safetensors and orbax/")


def test_same_format_needs_a_dtype(hf: Path, orbax: Path, tmp_path: Path) -> None:
    refusal(hf, tmp_path / "out", "is Hugging Face already", to="hf")
    refusal(orbax, tmp_path / "out", "is orbax already", to="orbax")


def test_a_model_type_with_other_parameters_is_refused(hf: Path, tmp_path: Path) -> None:
    refusal(
        hf,
        tmp_path / "out",
        "--model-type qwen2: its models have other parameters",
        to="hf",
        model_type="qwen2",
    )


def test_only_the_name_changes_with_the_model_type(tmp_path: Path) -> None:
    hf = write_tiny(tmp_path / "hf")
    convert(hf, tmp_path / "out", to="hf", model_type="qwen3")
    before, after = (
        json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for folder in (hf, tmp_path / "out")
    )
    assert after == {**before, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (hf / weights).read_bytes()


def test_unknown_format_and_dtype(hf: Path, tmp_path: Path) -> None:
    refusal(hf, tmp_path / "out", "'gguf'", to="gguf")
    refusal(hf, tmp_path / "out", "'int8'", dtype="int8")


def test_folders_inside_one_another(hf: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(hf)
    refusal(hf, hf, "are the same folder", force=True)
    refusal(hf, link, "are the same folder", force=True)
    refusal(hf, hf / "out", "lies inside the source folder")
    shutil.copy(hf / "config.json", tmp_path)
    refusal(hf, tmp_path, "holds the source", force=True)


def test_destination_in_use(hf: Path, pair: tuple[Path, Path], tmp_path: Path) -> None:
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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def test_empty_destination_is_taken(hf: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert(hf, tmp_path / "out", to="hf", dtype="bfloat16")
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_hugging_face_source_that_is_spoilt(hf: Path, tmp_path: Path) -> None:
    out, weights = tmp_path / "out", hf / "model.safetensors"
    whole = weights.read_bytes()
    set_tensors(hf, **{"model.norm.weight": None})
    refusal(hf, out, "'model.norm.weight' is missing")
    set_tensors(hf, **{"model.norm.weight": np.zeros(3, np.float32)})
    refusal(hf, out, "'model.norm.weight' has shape [3], expected [16]")
    weights.write_bytes(whole)
    set_tensors(hf, **{"model.norm.bias": np.zeros(3, np.float32)})
    refusal(hf, out, "'model.norm.bias' is not part of this model")
    weights.write_bytes(whole[:-1])
    refusal(hf, out, "model.safetensors", "truncated")
    weights.write_bytes(whole)
    (hf / "config.json").unlink()
    refusal(hf, out, "config.json", "no such file")


def test_float16_overflow_names_the_tensor(hf: Path, tmp_path: Path) -> None:
    set_tensors(hf, **{"model.norm.weight": np.float32([7e4] * 16)})
    for to in ("hf", "orbax"):
        refusal(hf, tmp_path / "out", "norm.weight", "float16", to=to, dtype="float16")


def test_orbax_source_that_is_spoilt(orbax: Path, tmp_path: Path) -> None:
    out, arrays = tmp_path / "out", read_arrays(orbax / "orbax")

    def rewrite(**changes: np.ndarray | None) -> None:
        shutil.rmtree(orbax / "orbax")
        merged = {**arrays, **changes}
        write_arrays(orbax / "orbax", {p: x for p, x in merged.items() if x is not None})

    rewrite(**{"layers.mlp.up_proj.kernel": None})
    refusal(orbax, out, "'layers.mlp.up_proj.kernel' is missing")
    rewrite(**{"layers.mlp.up_proj.bias": np.zeros(2, np.float32)})
    refusal(orbax, out, "'layers.mlp.up_proj.bias' is not part of this model")
    rewrite(**{"norm.scale": np.zeros(2, np.float32)})
    refusal(orbax, out, "'norm.scale' has shape [2], expected [16]")


@pytest.mark.parametrize("spoil", ["metadata", "manifest", "data", "cut", "empty"])
def test_orbax_folder_with_parts_missing(orbax: Path, tmp_path: Path, spoil: str) -> None:
    inner = orbax / "orbax"
    if spoil == "metadata":
        (inner / "_METADATA").unlink()
    elif spoil == "manifest":
        for path in inner.rglob("manifest.ocdbt"):
            path.unlink()
    elif spoil in ("data", "cut"):
        for path in [*inner.glob("d/*"), *inner.glob("ocdbt.process_0/d/*")]:
            path.write_bytes(path.read_bytes()[:20]) if spoil == "cut" else path.unlink()
    else:
        shutil.rmtree(inner)
        inner.mkdir()
    refusal(orbax, tmp_path / "out", str(inner), "damaged or not an orbax checkpoint")


def test_full_disk_is_told_and_leaves_the_destination(
    hf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    convert(hf, out)
    before = read_arrays(out / "orbax")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wedlm_jax.checkpoint.hf.write_config", full)
    with pytest.raises(StorageFailure, match=r"out: cannot be written \(No space left on device\)"):
        convert(hf, out, dtype="bfloat16", force=True)
    assert_same_bits(read_arrays(out / "orbax"), before)


def test_kill_halfway_loses_nothing(hf: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(hf, out)
    before = read_arrays(out / "orbax")
    # Sleeps where the weights are written and the swap is still to come.
    program = (
        "import sys, time; import wedlm_jax.checkpoint.hf as hf\n"
        "from wedlm_jax.checkpoint.convert import convert\n"
        "hf.copy_tokenizer = lambda *_: (print('halfway', flush=True), time.sleep(60))\n"
        "convert(sys.argv[1], sys.argv[2], dtype='bfloat16', force=True)"
    )
    command = [sys.executable, "-c", program, str(hf), str(out)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "halfway\n"
        child.send_signal(signal.SIGKILL)
    assert_same_bits(read_arrays(out / "orbax"), before)
    assert len(list(tmp_path.iterdir())) == 3  # the half-written folder is left beside
    done = convert(hf, out, dtype="bfloat16", force=True)
    assert done.dtypes == ("bfloat16",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


# --- the command -------------------------------------------------------------------------


def test_command_converts_and_says_what_it_wrote(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(hf), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    captured = capsys.readouterr()
    size = sum(x.size * 2 for x in arrays_from_model(load_checkpoint(hf)).values()) / 1e6
    assert f"wrote {tmp_path / 'out'}: orbax, 17 tensors, {size:.1f} MB, bfloat16" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(("given", "expected"), [(None, "cpu"), ("cpu,tpu", "cpu,tpu")])
def test_command_leaves_accelerators_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", given or "")
    if given is None:
        monkeypatch.delenv("JAX_PLATFORMS")
    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    assert os.environ["JAX_PLATFORMS"] == expected


def test_command_tells_a_mistake_in_one_line(
    hf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(tmp_path / "no"), str(tmp_path / "out")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"wedlm convert: {tmp_path / 'no'}: no such folder\n"


def test_help_is_quick_and_teaches() -> None:
    """Neither JAX nor anything heavier is imported for it."""
    program = (
        "import sys; from wedlm_jax.__main__ import main\n"
        "try: main(['convert', '--help'])\n"
        "finally: print(sorted({'jax', 'flax', 'orbax', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert "wedlm convert ./WeDLM-8B ./WeDLM-8B-orbax" in done.stdout
    assert done.stdout.endswith("[]\n")


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"qk_norm": True}, "qwen3"),
        ({"qk_norm": False, "attention_bias": True}, "qwen2"),
        ({"qk_norm": False, "mlp_bias": True}, "llama"),
        ({"qk_norm": False, "attention_bias": True, "attention_out_bias": True}, "llama"),
    ],
)
def test_export_finds_the_family_that_fits_even_where_config_json_is_silent(
    tmp_path: Path, fields: dict, name: str
) -> None:
    hf = write_tiny(tmp_path / "hf", **fields)
    raw = json.loads((hf / "config.json").read_text())
    silent = {key: value for key, value in raw.items() if key not in PARTS}
    (hf / "config.json").write_text(json.dumps(silent))
    assert export([str(hf), str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["model_type"] == name
    config = HFCheckpoint(tmp_path / "out").config
    assert {part for part in PARTS if getattr(config, part)} == {k for k, v in fields.items() if v}
