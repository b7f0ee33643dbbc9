"""The HTTP server (uvicorn) and what every request passes on its way to a route: limits of time and
size, the API key, the log, and the last exception handler.

uvicorn waits forever for the head of a request, and for a client that does not read. Both would
keep a socket, and the second also an answer's memory; `patient_protocol` closes such connections.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection
from typing import Any
from urllib.parse import quote

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from infer.serve.errors import ApiError, as_api_error
from infer.serve.metrics import Metrics
from wedlm_jax.errors import counted

LOG = logging.getLogger("wedlm.serve")
REQUESTS = logging.getLogger("wedlm.serve.requests")
"""Logs a line of level INFO for each request, without any text of prompts or answers."""

LONGEST_PATH = 200
"""Maximum number of characters of a path in a log line."""

PROBED_PATHS = ("/health", "/metrics")
"""Paths that are polled every few seconds: only their failures are logged."""

OPEN_PATHS = ("/", "/health")
"""Paths that need no key: probes have none, and the page asks for it."""


def make_server(
    app: ASGIApp,
    *,
    grace: float,
    client_timeout: float,
    on_ready: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """Returns a server. Its ``run(sockets=[...])`` answers requests until SIGTERM or Ctrl-C, and
    then finishes the running answers.

    Args:
      grace: seconds after which running answers are cut off.
      client_timeout: seconds that the head of a request may take, and that an answer may stay
        unread.
      on_ready: called once connections are accepted.
    """
    config = uvicorn.Config(
        app,
        http=patient_protocol(client_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # `outcomes` logs requests
        server_header=False,
        timeout_graceful_shutdown=grace,  # type: ignore[arg-type]
    )
    return _Server(config, on_ready)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if under_way := len(self.server_state.tasks):
            LOG.info(
                "shutting down: %s in progress, for at most %g s more",
                counted(under_way, "answer"),
                self.config.timeout_graceful_shutdown,
            )
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()


def patient_protocol(seconds: float) -> type[H11Protocol]:
    """Returns uvicorn's protocol with time limits.

    Args:
      seconds: maximum time from the start of the connection, or the first byte of a later request,
        to the end of the request's head; and maximum time that a client may read nothing of what
        is sent.
    """

    class PatientProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            self._head = _Timer(seconds, self._give_up)
            self._write = _Timer(seconds, self._give_up)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(JoinedWrites(transport))  # type: ignore[arg-type]
            self._head.start()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
                self._head.start()
            else:
                self._head.stop()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.trailing_data[0]:
                self._head.start()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._write.start()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._write.stop()

        def connection_lost(self, error: Exception | None) -> None:
            self._head.stop()
            self._write.stop()
            super().connection_lost(error)

        def _give_up(self) -> None:
            # Closing would wait until the client has read what was written.
            self.transport.abort()

    return PatientProtocol


class JoinedWrites:
    """A transport that joins what is written in one turn of the event loop. During each system call
    the engine's thread can take the interpreter, and the call then waits to get it back; uvicorn
    writes an answer's head, its pieces and its end separately."""

    def __init__(self, transport: asyncio.Transport):
        self._transport, self._parts = transport, list[bytes]()

    def write(self, data: bytes) -> None:
        if not self._parts:
            asyncio.get_running_loop().call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class _Timer:
    """Calls a function after some seconds, unless stopped before."""

    def __init__(self, seconds: float, call: Callable[[], None]):
        self._seconds, self._call = seconds, call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts, unless it is already running."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(self._seconds, self._call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


# --- middleware ---------------------------------------------------------------------------


def outcomes(app: ASGIApp, metrics: Metrics, paths: Collection[str]) -> ASGIApp:
    """Returns an application that counts answers by status, logs them, and turns any exception into
    an answer.

    Args:
      paths: paths of the routes; calls to others are counted together.
    """

    async def counted_and_logged(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        status, begun = None, time.monotonic()
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                path = scope["path"] if scope["path"] in paths else "other"
                metrics.calls.labels(path, str(status)).inc()
            await send(message)

        try:
            await app(scope, receive, noted)
        except asyncio.CancelledError:
            # By uvicorn, when the grace period is over.
            if status is not None:
                raise
            await ApiError(503, "the server is shutting down").response(scope, receive, noted)
        except Exception as error:
            answer = as_api_error(error)
            if answer.status >= 500:
                metrics.errors.inc()
            if status is None:
                await answer.response(scope, receive, noted)
        finally:
            probe = status == 200 and scope["path"] in PROBED_PATHS
            if REQUESTS.isEnabledFor(logging.INFO) and not probe:
                # Percent-encoded: whatever a client sends stays on one line.
                path = quote(scope["path"], safe="/:@+,=")[:LONGEST_PATH]
                seconds = time.monotonic() - begun
                line = f"{scope['method']} {path} {status or 'cut'} {seconds:.3f} s"
                REQUESTS.info(", ".join([line, *map(str, state.get("decoded", ()))]))

    return counted_and_logged


def key_check(app: ASGIApp, key: str) -> ASGIApp:
    """Returns an application that refuses requests without the API key."""

    def digest(key: bytes) -> bytes:
        # All digests have the same length, so the comparison's time reveals nothing about the key.
        return hashlib.sha256(key).digest()

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, given = authorization.partition(b" ")
            right = secrets.compare_digest(digest(given.strip()), digest(key.encode()))
            if scheme.lower() != b"bearer" or not right:
                error = ApiError(
                    401,
                    "expected the server's API key, as 'Authorization: Bearer KEY'",
                    code="invalid_api_key",
                    headers={"WWW-Authenticate": "Bearer"},
                )
                await error.response(scope, receive, send)
                return
        await app(scope, receive, send)

    return checked


def body_limits(app: ASGIApp, most: int, seconds: float) -> ASGIApp:
    """Returns an application that takes bodies of up to ``most`` bytes that arrive within
    ``seconds``."""

    # The rest of a body that is too large or too slow is not read. While FastAPI reads a body, it
    # passes on no exception but `HTTPException`.
    def refusal(status: int, message: str) -> HTTPException:
        return HTTPException(status, message, {"Connection": "close"})

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        too_large = refusal(413, f"the body is larger than {most:,} bytes")
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > most:
            answer = ApiError(413, too_large.detail, headers=too_large.headers)
            await answer.response(scope, receive, send)
            return
        deadline = asyncio.get_running_loop().time() + seconds
        size, whole = 0, False

        async def bounded() -> Message:
            nonlocal size, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                raise refusal(408, "the body did not arrive in time") from None
            size += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if size > most:
                raise too_large
            return message

        await app(scope, bounded, send)

    return limited
