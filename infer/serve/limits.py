"""Checks before a request reaches its route: its key, its size, its time; and the last place that
catches exceptions."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import secrets
import time
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from infer.serve.answer import Answer
from infer.serve.errors import ApiError, as_api_error
from infer.serve.metrics import Metrics

REQUESTS = logging.getLogger("wedlm.serve.requests")
"""Has a line, of level INFO, for each request: never what was asked or answered."""

LONGEST_PATH = 200
"""The longest path, in characters, that a log line shows."""

PROBED_PATHS = ("/health", "/metrics")
"""Polled every few seconds: only failures are worth a log line."""

OPEN_PATHS = ("/", "/health")
"""Need no key: probes have none, and the page asks for it."""


@dataclasses.dataclass(frozen=True)
class Decoded:
    """What a request's log line reports of its decoding.

    Attributes:
      id: ID of the answer.
      answer: whose tokens are counted.
    """

    id: str
    answer: Answer

    def __str__(self) -> str:
        made = sum(len(one.token_ids) for one in self.answer.so_far)
        return f"{self.answer.num_prompt_tokens} tokens in, {made} out, {self.id}"


class Outcomes:
    """Counts answers by status, logs them, and turns any exception into an answer.

    Args:
      paths: the routes' paths; calls of others are counted together.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: tuple[str, ...]):
        self._app, self._metrics, self._paths = app, metrics, paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status, begun = None, time.monotonic()
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._metrics.calls.labels(path, str(status)).inc()
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            # uvicorn cancels what takes longer than the grace.
            if status is not None:
                raise
            await ApiError(503, "the server is ending").response(scope, receive, noted)
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                self._metrics.errors.inc()
            if status is None:
                await answer.response(scope, receive, noted)
        finally:
            probe = status == 200 and scope["path"] in PROBED_PATHS
            if REQUESTS.isEnabledFor(logging.INFO) and not probe:
                # Percent-encoded: whatever a client sends stays on one line.
                path = quote(scope["path"], safe="/:@+,=")[:LONGEST_PATH]
                told = (
                    f"{scope['method']} {path} {status or 'cut'} {time.monotonic() - begun:.3f} s"
                )
                decoded = state.get("decoded")
                REQUESTS.info(told if decoded is None else f"{told}, {decoded}")


class KeyCheck:
    """Refuses requests without the key."""

    def __init__(self, app: ASGIApp, key: str):
        self._app, self._digest = app, _digest(key.encode())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            # Digests are of one length: how long the comparison takes tells nothing of the key.
            right = secrets.compare_digest(_digest(key.strip()), self._digest)
            if scheme.lower() != b"bearer" or not right:
                error = ApiError(
                    401,
                    "expected the server's API key, as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class BodyLimits:
    """Bounds the size of a body, and the time that it may take to arrive.

    Args:
      most: bytes.
      seconds: until all of it is there.
    """

    def __init__(self, app: ASGIApp, most: int, seconds: float):
        self._app, self._most, self._seconds = app, most, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        said = dict(scope["headers"]).get(b"content-length", b"0")
        if said.isdigit() and int(said) > self._most:
            await self._too_large().response(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + self._seconds
        size, whole = 0, False

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise _as_http(ApiError(408, "the body did not come in time")) from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > self._most:
                raise _as_http(self._too_large())
            return message

        await self._app(scope, bounded, send)

    def _too_large(self) -> ApiError:
        close = {"Connection": "close"}  # the rest of it is not wanted
        return ApiError(413, f"the body is larger than {self._most:,} bytes", headers=close)


def _as_http(error: ApiError) -> HTTPException:
    """Returns the error as an `HTTPException`, the one kind that FastAPI passes on while it reads a
    body."""
    return HTTPException(error.status, error.message, error.headers | {"Connection": "close"})
