"""Flags, environment and file: which of them counts, and what is refused by which name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from infer.serve import command
from infer.serve.command import layered
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(*flags: str, **environment: str) -> dict[str, object]:
    return layered(command.parser(), flags, environment)


def test_flags_override_the_environment_and_that_the_file(folder: Path) -> None:
    (folder / "wedlm.toml").write_text("[serve]\nport = 1\nmax-waiting = 2\ngrace = 3.5\n")
    assert settings() == {"port": 1, "max_waiting": 2, "grace": 3.5}
    named = settings("--port", "7", WEDLM_PORT="5", WEDLM_MAX_WAITING="6")
    assert named == {"port": 7, "max_waiting": 6, "grace": 3.5}


def test_values_of_every_kind(folder: Path) -> None:
    other = folder / "other.toml"
    other.write_text(
        "[serve]\n"
        'mesh = {tensor = 2, data = 4}\nstop = ["a b", "c"]\nno_warmup = true\nmode = "paper"\n'
        'window_size = "auto"\nentropy_threshold = "none"\npresence-penalty = -1.5\n'
        "[elsewhere]\nunknown = 1\n"
    )
    expected = {
        "mesh": [("tensor", 2), ("data", 4)],
        "stop": ["a b", "c"],
        "no_warmup": True,
        "mode": "paper",
        "window_size": "auto",
        "entropy_threshold": None,
        "presence_penalty": -1.5,
    }
    assert settings("--config", "other.toml") == expected
    assert settings(WEDLM_CONFIG=str(other)) == expected
    environment = {
        "WEDLM_MESH": "tensor=2 data=4",
        "WEDLM_STOP": "'a b' c",
        "WEDLM_NO_WARMUP": "1",
        "WEDLM_MODE": "paper",
        "WEDLM_WINDOW_SIZE": "auto",
        "WEDLM_ENTROPY_THRESHOLD": "none",
        "WEDLM_PRESENCE_PENALTY": "-1.5",
    }
    assert settings(**environment) == expected
    assert settings("--config", "other.toml", WEDLM_NO_WARMUP="false")["no_warmup"] is False


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[serve]\nprot = 1", "unknown key 'prot'; did you mean 'port'?"),
        ("[serve]\nport = 'x'", "wedlm.toml: port: invalid int value: 'x'"),
        ("[serve]\nport = [1, 2]", r"wedlm.toml: port: expected one value, not \[1, 2\]"),
        ("[serve]\nmode = 'fast'", "wedlm.toml: mode: invalid choice: 'fast'"),
        ("[serve]\nquiet = 'perhaps'", "quiet: expected true or false, not 'perhaps'"),
        ("serve = 1", r"expected \[serve\] to be a table"),
        ("[serve", "cannot be read as TOML"),
    ],
)
def test_a_bad_file_is_named(folder: Path, text: str, sentence: str) -> None:
    (folder / "wedlm.toml").write_text(text)
    with pytest.raises(InputError, match=sentence):
        settings()


def test_a_file_that_is_not_there_or_no_text(folder: Path) -> None:
    (folder / "binary.toml").write_bytes(b"\xff\x00")
    for name in ("binary.toml", "missing.toml", str(folder)):
        with pytest.raises(InputError, match="cannot be read as TOML"):
            settings("--config", name)


def test_a_bad_variable_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="WEDLM_PORT: invalid int value: 'x'"):
        settings(WEDLM_PORT="x")
    assert settings(WEDLM_PROT="1", OTHER="2") == {}
    said = "WEDLM_PROT is ignored, as no setting is called so; did you mean 'port'?"
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "70000"], "--port: expected 0 to 65535"),
        (["--grace", "0"], "--grace: expected a number above 0"),
        (["--max-waiting", "-1"], "--max-waiting: expected"),
        (["--api-key", " "], "--api-key: expected a key"),
        (["--temperature", "-1"], "--temperature: expected a number"),
        (["--n", "2", "--temperature", "1"], "--n: requests say how many"),
        (["--host", "nowhere.invalid"], "--host nowhere.invalid --port 8000: "),
        (["--port", "0", "--model", "missing"], "missing"),
    ],
)
def test_bad_flags_end_it_before_it_listens(
    flags: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags]) == 2
    assert sentence in capsys.readouterr().err


def test_an_address_that_is_taken_is_told_before_the_model_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with command.listening_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", "missing"]) == 2
    assert "in use" in capsys.readouterr().err


def test_without_its_packages_it_says_how_to_get_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert "pip install 'wedlm-jax[serve]'" in capsys.readouterr().err
