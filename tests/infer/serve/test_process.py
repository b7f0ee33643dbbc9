"""`wedlm serve` as a process: it begins, drains when asked to, and survives being killed."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from infer.serve.answer import EventStream

SLOW = {"prompt": "the cat", "max_tokens": 250, "ignore_eos": True, "mode": "ar"}


@contextlib.contextmanager
def serving(
    checkpoint: Path, *flags: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
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
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert " at http://" in line, process.communicate()[1]
        yield process, line.split(" at ")[1].strip().removesuffix("/v1")
    finally:
        process.kill()
        process.communicate()


def ask(url: str, **fields: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json=SLOW | fields, timeout=60)


@pytest.mark.full
def test_sigterm_under_load_and_kill_and_restart(checkpoint: Path) -> None:
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
        asked: list[concurrent.futures.Future[httpx2.Response]] = []
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
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_stream_that_takes_longer_than_the_grace_ends_with_the_reason() -> None:
    sent, ended = list[Any](), list[bool]()

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"
        await asyncio.sleep(60)

    async def nothing() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message.get("body"))

    async def cut_off() -> None:
        stream = EventStream.__new__(EventStream)
        stream._answer, stream._events = SimpleNamespace(end=lambda: ended.append(True)), events()
        stream.raw_headers = []
        task = asyncio.create_task(stream({}, nothing, send))
        await asyncio.sleep(0.05)
        task.cancel()  # as uvicorn does
        await task

    asyncio.run(cut_off())
    assert sent[:2] == [None, b"data: 1\n\n"]
    assert b"the server is ending" in sent[2]
    assert sent[2].endswith(b"data: [DONE]\n\n")
    assert ended


@pytest.mark.full
def test_what_takes_longer_than_the_grace_is_cut_off(checkpoint: Path) -> None:
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
        assert "the server is ending" in answer.json()["error"]["message"]
