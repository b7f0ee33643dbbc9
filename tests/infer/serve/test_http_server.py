"""What stands before the routes. Clients that are slow, broken, greedy or gone hurt nobody else and
leave nothing behind; each request has a line in the log; keys and origins are checked."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import time
from unittest.mock import Mock, call

import httpx2
import pytest
from openai import OpenAI

from infer.serve.command import listening_socket
from infer.serve.http_server import REQUESTS, JoinedWrites
from tests.infer.serve.running_server import MODEL, running_server, wait_until

LONG = {"prompt": "Once upon a time", "max_tokens": 900, "ignore_eos": True, "window_size": 0}
"""An answer that takes a while."""


@pytest.fixture(scope="module")
def strict(offline):
    """A server of little patience, with few places."""
    with running_server(
        offline, client_timeout=0.5, body_seconds=0.5, max_body=20_000, max_waiting=2
    ) as server:
        yield server


def connect(server):
    sock = socket.create_connection(("127.0.0.1", server.port))
    sock.settimeout(10)
    return sock


def head(**headers):
    lines = ["POST /v1/completions HTTP/1.1", "Host: x", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def asking(**fields):
    body = json.dumps(LONG | fields).encode()
    return head(Content_Length=len(body)) + body


def everything(sock):
    """What comes until the server closes the connection."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while part := sock.recv(65536):
            data += part
    return data


def answer_to(server, data):
    with connect(server) as sock:
        sock.sendall(data)
        return everything(sock)


def still_answers(server):
    answer = httpx2.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 2})
    assert answer.status_code == 200
    server.wait_until_idle()


# --- HTTP ---------------------------------------------------------------------------------


NOT_HTTP = [
    b"nonsense\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: " + b"a" * 200_000 + b"\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
]


def test_what_is_no_http_is_answered_or_dropped(strict):
    for data in NOT_HTTP:
        answer = answer_to(strict, data)
        assert answer == b"" or answer.split()[1][:1] == b"4"
    still_answers(strict)


GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
PART_OF_A_BODY = head(Content_Length=100) + b'{"prompt"'


NOT_ENOUGH = [
    (b"", None, b""),
    (GET[:14], None, b""),
    (GET + GET[:8], b"200", b""),
    (PART_OF_A_BODY, b"408", b"the body did not arrive in time"),
    (head(Content_Length=10**15), b"413", b"the body is larger than"),
]


def test_what_does_not_come_is_not_waited_for(strict):
    started = time.monotonic()
    for data, status, sentence in NOT_ENOUGH:
        answer = answer_to(strict, data)
        assert answer.count(b"HTTP/1.1 ") == (status is not None)
        assert answer.split()[1:2] == ([] if status is None else [status])
        assert sentence in answer
    with connect(strict) as sock:
        sock.sendall(head(Transfer_Encoding="chunked"))
        with contextlib.suppress(OSError):
            while time.monotonic() - started < 20:  # a body that trickles
                sock.sendall(b"1\r\nx\r\n")
                time.sleep(0.05)
    assert time.monotonic() - started < 15
    still_answers(strict)


def test_a_body_that_is_too_large(strict):
    body = json.dumps({"prompt": "x" * 30_000}).encode()
    headers = {"Content-Type": "application/json"}
    chunks = (body[i : i + 1000] for i in range(0, len(body), 1000))
    for content in (body, chunks):
        answer = httpx2.post(f"{strict.url}/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the body is larger than 20,000 bytes"
    still_answers(strict)


# --- clients that go away ------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_what_nobody_waits_for_ends_at_once(strict, stream):
    with connect(strict) as sock:
        sock.sendall(asking(stream=stream))
        if stream:
            assert b"data:" in sock.recv(4096) + sock.recv(4096)
        wait_until(lambda: strict.service.engine.counters.running == 1)
    strict.wait_until_idle()
    if not stream:
        wait_until(lambda: 'status="499"' in httpx2.get(f"{strict.url}/metrics").text)
    still_answers(strict)


def test_a_client_that_never_reads_is_dropped(offline):
    """Its answer is larger than what the system keeps for it."""
    large = {"prompt": ["a", "b"], "n": 4, "temperature": 0.7, "logprobs": 4, "stream": True}
    with running_server(offline, client_timeout=0.5, send_buffer=4096) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(asking(**large, return_token_ids=True))
            wait_until(lambda: server.service.engine.counters.running > 0)
            server.wait_until_idle()
        metrics = httpx2.get(f"{server.url}/metrics").text
        assert re.search(r"wedlm_sequences_aborted_total [1-8]\.", metrics)
        still_answers(server)


def test_a_full_queue_says_when_to_come_again(strict):
    """Four decode and two wait; the seventh is told."""
    engine = strict.service.engine
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            sock = stack.enter_context(connect(strict))
            sock.sendall(asking())
        wait_until(lambda: engine.counters.running + engine.counters.waiting == 6)
        answer = httpx2.post(f"{strict.url}/v1/completions", json=LONG)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert httpx2.get(f"{strict.url}/health").status_code == 200
    strict.wait_until_idle()
    still_answers(strict)


# --- log lines -------------------------------------------------------------------------------

SECONDS = r"\d+\.\d{3} s"


@pytest.fixture
def lines(server, caplog):
    logged = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(f"{record.levelname} {record.getMessage()}")
    server.wait_until_idle()
    with caplog.at_level(logging.INFO, logger=REQUESTS.name):
        REQUESTS.addHandler(handler)
        yield logged
        REQUESTS.removeHandler(handler)


def test_an_answer_has_a_line_with_what_it_took(server, client, lines):
    """A stream has it when it is over."""
    whole = client.completions.create(
        model=MODEL, prompt=["Once upon", "One day"], max_tokens=6, n=2, temperature=0.7
    )
    messages = [{"role": "user", "content": "Once upon a time"}]
    asked = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 6}
    *_, last = client.chat.completions.create(model=MODEL, messages=messages, **asked)
    wait_until(lambda: len(lines) == 2)
    paths = ("/v1/completions", "/v1/chat/completions")
    for line, path, one in zip(lines, paths, (whole, last), strict=True):
        counts = f"{one.usage.prompt_tokens} tokens in, {one.usage.completion_tokens} out, {one.id}"
        assert re.fullmatch(rf"INFO POST {path} 200 {SECONDS}, {counts}", line), line
    lines.clear()
    for path in ("/health", "/metrics", "/v1/models", "/no%0Asuch%20path?key=secret"):
        httpx2.get(server.url + path)  # probes have no lines
    httpx2.post(f"{server.url}/v1/completions", json={"prompt": "secret", "top_p": 9})
    wait_until(lambda: len(lines) == 3)
    expected = ("GET /v1/models 200", "GET /no%0Asuch%20path 404", "POST /v1/completions 400")
    for line, beginning in zip(lines, expected, strict=True):
        assert re.fullmatch(rf"INFO {re.escape(beginning)} {SECONDS}", line), line


# --- keys and origins ----------------------------------------------------------------------


def test_a_key_is_wanted_where_one_is_set(offline):
    with running_server(offline, api_key="s3cret") as server:
        with OpenAI(base_url=f"{server.url}/v1", api_key="s3cret") as client:
            client.models.list()
        for path in ("/", "/health", "/metrics", "/v1/models", "/openapi.json", "/nowhere"):
            status = httpx2.get(server.url + path).status_code
            assert status == (200 if path in ("/", "/health") else 401)
        for given in ("Bearer s3cre", "Bearer s3cret2", "Bearer", "Basic s3cret", "s3cret"):
            answer = httpx2.get(f"{server.url}/metrics", headers={"Authorization": given})
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            error = answer.json()["error"]
            assert error["type"] == "authentication_error"
            assert "expected the server's API key" in error["message"]


def test_pages_of_other_origins_are_let_in_only_where_named(server, offline):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked = httpx2.options(f"{server.url}/v1/completions", headers=ask)
    assert "access-control-allow-origin" not in asked.headers
    with running_server(offline, cors_origins=("https://a.example",), api_key="k") as other:
        for path in ("/v1/completions", "/v1/chat/completions"):
            asked = httpx2.options(other.url + path, headers=ask)
            assert asked.headers["access-control-allow-origin"] == "https://a.example"
        wrong = httpx2.options(
            f"{other.url}/v1/completions", headers=ask | {"Origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in wrong.headers
        refused = httpx2.get(f"{other.url}/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"


# --- what is sent when ---------------------------------------------------------------------


def test_pieces_of_an_answer_go_out_at_once():
    """Without TCP_NODELAY a piece waits until the one before it is acknowledged. asyncio sets it,
    but only on sockets that name their protocol."""
    with listening_socket("127.0.0.1", 0) as sock:
        assert sock.proto == socket.IPPROTO_TCP


def test_writes_of_one_turn_are_one_system_call():
    async def calls():
        transport = Mock(**{"is_closing.return_value": False})
        joined = JoinedWrites(transport)
        joined.write(b"head ")
        joined.write(b"piece")
        assert not transport.method_calls
        await asyncio.sleep(0)
        joined.write(b" end")
        joined.close()
        transport.is_closing.return_value = True
        joined.write(b"too late")
        await asyncio.sleep(0)
        return [one for one in transport.method_calls if one != call.is_closing()]

    # What was written before the end goes out first.
    expected = [call.write(b"head piece"), call.write(b" end"), call.close()]
    assert asyncio.run(calls()) == expected
