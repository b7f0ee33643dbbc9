"""`wedlm serve`: which of flags and environment counts, and how bad ones are named. A process
starts, drains when asked to and survives being killed."""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from unittest.mock import Mock

import httpx2
import pytest

from infer.serve import command
from infer.serve.answer import EventStream
from infer.serve.command import layered
from infer.serve.http_server import REQUESTS
from wedlm_jax.__main__ import main
from wedlm_jax.errors import InputError


def settings(*flags, **environment):
    return layered(command.parser(), flags, environment)


def test_flags_override_the_environment():
    named = settings("--port", "7", WEDLM_PORT="5", WEDLM_MAX_WAITING="6")
    assert named == {"port": 7, "max_waiting": 6}


VALUES = [
    ("mesh", "tensor=2 data=4", [("tensor", 2), ("data", 4)]),
    ("stop", "'a b' c", ["a b", "c"]),
    ("no_warmup", "1", True),
    ("no_warmup", "False", False),
    ("mode", "paper", "paper"),
    ("window_size", "auto", "auto"),
    ("entropy_threshold", "none", None),
    ("presence_penalty", "-1.5", -1.5),
    ("grace", "3.5", 3.5),
]


def test_values_of_every_kind():
    for name, text, value in VALUES:
        assert settings(**{f"WEDLM_{name.upper()}": text}) == {name: value}


BAD_VALUES = [
    ("WEDLM_PORT", "x", "WEDLM_PORT: expected a whole number, not 'x'"),
    ("WEDLM_MODE", "fast", "WEDLM_MODE: invalid choice: 'fast'"),
    ("WEDLM_STOP", "it's", 'WEDLM_STOP: "it\'s" is not a list of values .No closing quotation'),
    ("WEDLM_QUIET", "perhaps", "WEDLM_QUIET: expected true or false, not 'perhaps'"),
]


def test_bad_variables_are_named(capsys):
    for name, text, sentence in BAD_VALUES:
        with pytest.raises(InputError, match=sentence):
            settings(**{name: text})
    assert settings(WEDLM_PROT="1", OTHER="2") == {}
    warning = "WEDLM_PROT is ignored, as no setting has this name; did you mean 'port'?"
    assert warning in capsys.readouterr().err


def test_what_a_server_lacks_ends_it_before_it_listens(monkeypatch, capsys):
    with command.listening_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["serve", "--port", port, "--model", "missing"]) == 2
        assert "in use" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "fastapi", None)
    assert main(["serve"]) == 2
    assert "needs fastapi, which is not installed" in capsys.readouterr().err


# --- the process -------------------------------------------------------------------------

SLOW = {"prompt": "the cat", "max_tokens": 250, "ignore_eos": True, "mode": "ar"}


@contextlib.contextmanager
def serving(checkpoint, *flags, **environment):
    """A server process and its URL."""
    command = [sys.executable, "-m", "wedlm_jax", "serve", "--model", str(checkpoint)]
    options = ["--batch-size", "2", "--window-size", "4", "--deterministic", *flags]
    process = subprocess.Popen(
        [*command, *options],
        env=os.environ | {"WEDLM_PORT": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        assert " at http://" in line, process.communicate()[1]
        yield process, line.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        process.kill()
        process.communicate()


def ask(url, **fields):
    return httpx2.post(f"{url}/v1/completions", json=SLOW | fields, timeout=60)


@pytest.mark.full
def test_sigterm_under_load_and_kill_and_restart(checkpoint):
    with serving(checkpoint, WEDLM_SERVED_MODEL_NAME="cat", WEDLM_API_KEY="k") as (process, url):
        assert httpx2.get(f"{url}/v1/models").status_code == 401
        headers = {"Authorization": "Bearer k"}
        (card,) = httpx2.get(f"{url}/v1/models", headers=headers).json()["data"]
        assert card["id"] == "cat"
        process.kill()
        process.wait(10)
        port = url.rpartition(":")[2]
    # The address is free at once.
    with (
        serving(checkpoint, "--port", port) as (process, url),
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        expected = ask(url).json()["choices"]
        asked = []
        while "wedlm_sequences_running 2.0" not in httpx2.get(f"{url}/metrics").text:
            if all(one.done() for one in asked):  # between two looks, perhaps
                asked = [pool.submit(ask, url, stream=number % 2 == 1) for number in range(6)]
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        answers = [one.result(60) for one in asked]
        assert process.wait(30) == 0
        for number, answer in enumerate(answers):
            assert answer.status_code == 200
            if number % 2:
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["choices"] == expected
        with pytest.raises(httpx2.ConnectError):
            ask(url)
        assert "Traceback" not in process.stderr.read()


def test_a_stream_that_takes_longer_than_the_grace_ends_with_the_reason():
    sent, answer = [], Mock()

    async def events():
        yield b"data: 1\n\n"
        await asyncio.sleep(60)

    async def send(message):
        sent.append(message.get("body"))

    async def cut_off():
        stream = EventStream(answer, Mock())
        stream._events = events()
        task = asyncio.create_task(stream({}, lambda: asyncio.sleep(60), send))
        await asyncio.sleep(0.05)
        task.cancel()  # as uvicorn does
        await task

    asyncio.run(cut_off())
    assert sent[:2] == [None, b"data: 1\n\n"]
    assert b"the server is shutting down" in sent[2]
    assert sent[2].endswith(b"data: [DONE]\n\n")
    answer.end.assert_called_once()


@pytest.mark.full
def test_what_takes_longer_than_the_grace_is_cut_off(checkpoint):
    flags = ("--grace", "0.3", "--no-warmup", "--burst-seconds", "0.001")
    with (
        serving(checkpoint, *flags) as (process, url),
        concurrent.futures.ThreadPoolExecutor() as pool,
    ):
        # It compiles: that takes longer.
        asked = pool.submit(ask, url)
        time.sleep(0.3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        answer = asked.result(20)
        assert answer.status_code == 503
        assert "the server is shutting down" in answer.json()["error"]["message"]


def test_quiet_turns_the_lines_off(monkeypatch, caplog):
    caplog.set_level(logging.INFO, "wedlm.serve")  # as the command sets it
    caplog.set_level(logging.NOTSET, REQUESTS.name)
    monkeypatch.setattr("infer.serve.http_server.make_server", Mock())
    monkeypatch.setattr("infer.serve.app.make_app", Mock())
    service = Mock(**{"engine.programs.is_compiling": False})
    with command.listening_socket("127.0.0.1", 0) as sock:
        for flags, logged in (([], True), (["--quiet"], False)):
            assert command.serve(service, sock, vars(command.parser().parse_args(flags))) == 0
            assert REQUESTS.isEnabledFor(logging.INFO) == logged


def test_only_long_waits_are_logged(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "wedlm.serve")
    with command.logged("compiling a program"):
        pass
    assert not caplog.messages
    monkeypatch.setattr(command, "LONG_S", 0.0)
    with command.logged("compiling a program"):
        pass
    first, last = caplog.messages
    assert first == "compiling a program, 0 s so far"
    assert last.startswith("compiling a program took 0.")
