"""The line that the server logs of each request."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from openai import OpenAI

from infer.serve import command
from infer.serve.http_server import REQUESTS
from tests.infer.serve.running_server import MODEL, RunningServer

SECONDS = r"\d+\.\d{3} s"


@pytest.fixture
def lines(server: RunningServer, caplog: pytest.LogCaptureFixture) -> Iterator[list[str]]:
    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert record.levelno == logging.INFO
            said.append(record.getMessage())

    kept = Kept()
    server.wait_until_idle()
    with caplog.at_level(logging.INFO, logger=REQUESTS.name):
        REQUESTS.addHandler(kept)
        yield said
        REQUESTS.removeHandler(kept)


def test_a_request_has_a_line_with_what_it_took(
    server: RunningServer, client: OpenAI, lines: list[str]
) -> None:
    said = client.completions.create(
        model=MODEL, prompt=["Once upon", "One day"], max_tokens=6, n=2, temperature=0.7
    )
    assert said.usage is not None
    counts = f"{said.usage.prompt_tokens} tokens in, {said.usage.completion_tokens} out"
    server.wait(lambda: len(lines) == 1)
    expected = rf"POST /v1/completions 200 {SECONDS}, {counts}, {said.id}"
    assert re.fullmatch(expected, lines[0]), lines[0]


def test_a_stream_has_its_line_when_it_is_over(
    server: RunningServer, client: OpenAI, lines: list[str]
) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Once upon a time"}],
        max_tokens=6,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    usage = chunks[-1].usage
    assert usage is not None
    counts = f"{usage.prompt_tokens} tokens in, {usage.completion_tokens} out, {chunks[0].id}"
    server.wait(lambda: len(lines) == 1)
    assert re.fullmatch(rf"POST /v1/chat/completions 200 {SECONDS}, {counts}", lines[0]), lines[0]
    assert "Once" not in lines[0]


def test_refusals_and_other_paths_have_lines_and_probes_have_none(
    server: RunningServer, lines: list[str]
) -> None:
    for path in ("/health", "/metrics", "/v1/models", "/no%0Asuch%20path?key=secret"):
        httpx2.get(server.url + path)
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": "secret", "top_p": 9})
    server.wait(lambda: len(lines) == 3)
    expected = ("GET /v1/models 200", "GET /no%0Asuch%20path 404", "POST /v1/completions 400")
    for line, beginning in zip(lines, expected, strict=True):
        assert re.fullmatch(rf"{re.escape(beginning)} {SECONDS}", line), line


@pytest.mark.parametrize(("flags", "level"), [([], logging.INFO), (["--quiet"], logging.NOTSET)])
def test_quiet_turns_the_lines_off(
    flags: list[str], level: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SimpleNamespace(run=lambda sockets: None)
    service: Any = SimpleNamespace(
        engine=SimpleNamespace(programs=SimpleNamespace(is_compiling=False)),
        options=SimpleNamespace(model=MODEL),
    )
    monkeypatch.setattr("infer.serve.http_server.make_server", lambda *_, **__: server)
    monkeypatch.setattr("infer.serve.app.make_app", lambda service: None)
    before = REQUESTS.level
    REQUESTS.setLevel(logging.NOTSET)
    try:
        with command.listening_socket("127.0.0.1", 0) as sock:
            assert command.serve(service, sock, vars(command.parser().parse_args(flags))) == 0
        assert REQUESTS.level == level
    finally:
        REQUESTS.setLevel(before)
