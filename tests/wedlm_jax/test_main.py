"""The `wedlm` command works in any folder, and names what it does not know."""

import subprocess
import sys
from pathlib import Path

import pytest

from docs.reference import subcommand_parser
from wedlm_jax.__main__ import SUBCOMMANDS, help_text, main


@pytest.mark.parametrize(("command", "module"), [("generate", True), ("tokenize", False)])
def test_a_folder_with_a_train_py_and_an_infer_of_its_own(tmp_path, command, module):
    (tmp_path / "infer").mkdir()
    for name in ("infer/__init__.py", "train.py"):
        (tmp_path / name).write_text("raise SystemExit('imported the wrong one')\n")
    script = str(Path(sys.executable).with_name("wedlm"))
    words = [sys.executable, "-m", "wedlm_jax"] if module else [script]
    done = subprocess.run(
        [*words, command, "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: wedlm {command}")


def test_an_unknown_command_is_named(capsys):
    assert main(["tokenise"]) == 2
    assert "no command 'tokenise'; did you mean 'tokenize'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", SUBCOMMANDS)
def test_an_unknown_option_gets_the_nearest_known_one(command, capsys):
    parser = subcommand_parser(command)
    known = max(parser._option_string_actions, key=len)
    for action in parser._actions:
        action.required = False
    misspelt = f"{known[:4]}q{known[4:]}"
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args([f"{misspelt}=x", "--zzzz"])
    message = f"unrecognized arguments: {misspelt}=x --zzzz; did you mean {known}?\n"
    assert message in capsys.readouterr().err


def test_help_lists_every_command(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed == help_text()
    assert all(f"\n  {name} " in printed for name in SUBCOMMANDS)
    assert max(map(len, printed.splitlines())) <= 90
