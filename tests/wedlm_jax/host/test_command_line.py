"""A refused command: its usage and one sentence on standard error, and status 2; and what other
statuses say."""

import errno
import os
import signal

import pytest

from wedlm_jax.errors import (
    CALLER_ERRORS,
    EXIT_STATUS,
    BadData,
    InputError,
    StorageFailure,
    file_error,
)
from wedlm_jax.host.command_line import CommandParser, run_command


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--temprature", "1"], "arguments: --temprature 1; did you mean --temperature?"),
        (["--temprature=1"], "--temprature=1; did you mean --temperature?"),
        (
            ["--temprature", "1", "--max_tokens", "2"],
            "did you mean --temperature and --max-tokens?",
        ),
        (["--mode", "papr"], "invalid choice: 'papr'"),
        (["--mode", "papr"], "; did you mean 'paper'?\n"),
        (["--zzz"], "unrecognized arguments: --zzz\n"),
        (["prompt"], "unrecognized arguments: prompt\n"),
        (["--temperature", "hot"], "argument --temperature: expected a number, not 'hot'\n"),
    ],
)
def test_a_refusal_names_the_nearest_options(given, message, capsys):
    parser = CommandParser(prog="wedlm generate")
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--max-tokens", type=int)
    parser.add_argument("--mode", choices=("paper", "ar"))
    with pytest.raises(SystemExit) as end:
        parser.parse_args(given)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("wedlm generate: ")
    assert err.endswith("\n`wedlm generate --help` lists the options\n")
    assert message in err


# --- exit statuses -----------------------------------------------------------------------


def failing(error):
    raise error


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (InputError("row 3"), 2, "it: row 3\n"),
        (BadData("3 of 3"), 65, "it: 3 of 3\n"),
        (StorageFailure("a: full"), 74, "it: a: full\n"),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 74, "it: a: No space left on"),
        (OSError(errno.EIO, "Input/output error"), 74, "it: Input/output error\n"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset"), 74, "it: Connection reset\n"),
        (KeyboardInterrupt(), 130, "it: interrupted\n"),
    ],
)
def test_each_kind_of_end_has_its_status(error, status, message, capsys):
    assert run_command("it", lambda: failing(error)) == status
    assert status in EXIT_STATUS
    assert capsys.readouterr().err.startswith(message)


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(errno.ENOENT, "none", "a")])
def test_a_fault_of_the_program_shows_where(error):
    with pytest.raises(type(error)):
        run_command("it", lambda: failing(error))


def test_signals_have_their_usual_numbers():
    signals = [status - 128 for status in EXIT_STATUS if status > 128]
    assert signals == [signal.SIGINT, signal.SIGPIPE, signal.SIGTERM]


@pytest.mark.parametrize("number", sorted(errno.errorcode))
def test_a_file_systems_refusal_passes_unless_the_caller_is_wrong(number):
    error = file_error("a/b", "cannot be written", OSError(number, os.strerror(number)))
    expected = InputError if number in CALLER_ERRORS else StorageFailure
    assert type(error) is expected
    assert str(error) == f"a/b: cannot be written ({os.strerror(number)})"
