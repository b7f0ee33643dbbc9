"""Clients that are slow, broken, greedy or gone: they hurt nobody else and leave nothing behind."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest

from tests.infer.serve.running_server import RunningServer, running_server
from wedlm_jax.llm import LLM

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "window_size": 0}
"""An answer that takes a while."""


@pytest.fixture(scope="module")
def strict(offline: LLM) -> Iterator[RunningServer]:
    """A server of little patience, with few places."""
    with running_server(
        offline, client_timeout=0.5, body_seconds=0.5, max_body=20_000, max_waiting=2
    ) as server:
        yield server


def connect(server: RunningServer) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    return sock


def head(path: str = "/v1/completions", **headers: object) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def everything(sock: socket.socket) -> bytes:
    """What comes until the other side closes; b"" where it does so without a word."""
    data = b""
    try:
        while part := sock.recv(65536):
            data += part
    except ConnectionResetError:
        pass
    return data


def still_answers(server: RunningServer) -> None:
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200
    server.wait_until_idle()


# --- HTTP ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
    ],
)
def test_what_is_no_http_is_answered_or_dropped(strict: RunningServer, data: bytes) -> None:
    with connect(strict) as sock:
        sock.sendall(data)
        answer = everything(sock)
    assert answer == b"" or answer.split()[1][:1] == b"4"
    still_answers(strict)


def test_a_request_s_head_that_does_not_come(strict: RunningServer) -> None:
    with connect(strict) as silent, connect(strict) as slow:
        slow.sendall(b"GET /health HT")
        started = time.monotonic()
        assert everything(silent) == everything(slow) == b""
        assert time.monotonic() - started < 5


def test_a_second_head_that_does_not_come(strict: RunningServer) -> None:
    with connect(strict) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea")
        answer = everything(sock)
    assert answer.count(b"HTTP/1.1 200") == 1


def test_a_body_that_does_not_come(strict: RunningServer) -> None:
    with connect(strict) as sock:
        sock.sendall(head(Content_Length=100) + b'{"prompt"')
        answer = everything(sock)
    assert answer.split()[1] == b"408"
    assert b"the body did not come in time" in answer
    still_answers(strict)


def test_a_body_that_trickles(strict: RunningServer) -> None:
    with connect(strict) as sock:
        sock.sendall(head(Transfer_Encoding="chunked"))
        started = time.monotonic()
        try:
            while time.monotonic() - started < 5:
                sock.sendall(b"1\r\nx\r\n")
                time.sleep(0.05)
        except OSError:
            pass
        assert time.monotonic() - started < 3


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(strict: RunningServer, chunked: bool) -> None:
    body = json.dumps({"prompt": "x" * 30_000}).encode()
    content = (body[i : i + 1000] for i in range(0, len(body), 1000)) if chunked else body
    answer = httpx2.post(
        f"{strict.url}/v1/completions",
        content=content,
        headers={"Content-Type": "application/json"},
    )
    assert answer.status_code == 413
    assert answer.json()["error"]["message"] == "the body is larger than 20,000 bytes"
    still_answers(strict)


def test_a_body_that_says_it_is_huge_is_not_waited_for(strict: RunningServer) -> None:
    with connect(strict) as sock:
        sock.sendall(head(Content_Length=10**15))
        answer = everything(sock)
    assert answer.split()[1] == b"413"


# --- clients that go away ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_waits_for_ends_at_once(strict: RunningServer, stream: bool) -> None:
    body = json.dumps(LONG | {"stream": stream}).encode()
    status = strict.service.engine
    with connect(strict) as sock:
        sock.sendall(head(Content_Length=len(body)) + body)
        if stream:
            assert b"data:" in sock.recv(4096) + sock.recv(4096)
        strict.wait(lambda: status.counters.running == 1)
    strict.wait_until_idle()
    still_answers(strict)


def test_a_client_that_never_reads_is_dropped(offline: LLM) -> None:
    """Its answer is larger than what the system keeps for it."""
    body = LONG | {
        "stream": True,
        "logprobs": 4,
        "n": 4,
        "temperature": 0.7,
        "return_token_ids": True,
    }
    data = json.dumps(body | {"prompt": ["a", "b"]}).encode()
    with running_server(offline, client_timeout=0.5, send_buffer=4096) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(head(Content_Length=len(data)) + data)
            server.wait(lambda: server.service.engine.counters.running > 0)
            server.wait_until_idle()
        assert re.search(
            r"wedlm_sequences_aborted_total [1-8]\.", httpx2.get(f"{server.url}/metrics").text
        )
        still_answers(server)


def test_a_full_queue_says_when_to_come_again(strict: RunningServer) -> None:
    """Four decode and two wait; the seventh is told."""
    bodies = json.dumps(LONG).encode()
    socks = [connect(strict) for _ in range(6)]
    try:
        for sock in socks:
            sock.sendall(head(Content_Length=len(bodies)) + bodies)
        counters = strict.service.engine
        strict.wait(lambda: counters.counters.running + counters.counters.waiting == 6)
        answer = httpx2.post(f"{strict.url}/v1/completions", json=LONG)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert httpx2.get(f"{strict.url}/health").status_code == 200
    finally:
        for sock in socks:
            sock.close()
    strict.wait_until_idle()
    still_answers(strict)
