"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.serve.answer import Answer
from infer.serve.errors import ApiError, as_api_error
from infer.serve.shapes import TextShape

PATIENCE = 15.0
"""Seconds without news after which a comment is sent: what stands between might take the connection
for dead."""

DONE = b"data: [DONE]\n\n"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass on each event when it comes."""


class EventStream(StreamingResponse):
    """Sends an answer's chunks, which has begun already; ends it however the sending ends."""

    def __init__(self, answer: Answer, shape: TextShape, on_failure: Callable[[], None]):
        self._answer = answer
        self._events = events_of(answer, shape, on_failure)
        super().__init__(self._events, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own way makes a group of tasks for each answer; one task is cheaper.
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        watch = asyncio.create_task(self._end_with_client(receive))
        try:
            async with contextlib.aclosing(self._events):
                await send(head)
                async for body in self._events:
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except asyncio.CancelledError:  # by uvicorn: it has taken longer than the grace
            last = event(ApiError(503, "the server is ending").body) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            watch.cancel()
            self._answer.end()

    async def _end_with_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._answer.end()


async def events_of(
    answer: Answer, shape: TextShape, on_failure: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream, several at once where they come together. An exception is the
    last one, in the shape of an error."""
    try:
        if opening := shape.opening():
            yield b"".join(map(event, opening))
        async for pieces in answer.pieces(PATIENCE):
            chunks = shape.chunks(pieces)
            if answer.is_over:
                chunks += shape.closing(answer.so_far)
            done = DONE if answer.is_over else b""
            yield b"".join(map(event, chunks)) + done or b": waiting\n\n"
    except Exception as error:
        answered = as_api_error(error)
        if answered.status >= 500:
            on_failure()
        yield event(answered.body)


def event(data: dict[str, Any]) -> bytes:
    """Returns one event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
