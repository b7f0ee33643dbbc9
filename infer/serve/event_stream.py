"""Server-sent events: an answer as it comes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.serve.answer import Answer
from infer.serve.errors import as_api_error
from infer.serve.shapes import TextShape

PATIENCE = 15.0
"""Seconds without news after which a comment is sent: what stands between might take the connection
for dead."""

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Proxies are to pass on each event when it comes."""


class EventStream(StreamingResponse):
    """Sends an answer's chunks, which has begun already; ends it however the sending ends."""

    def __init__(self, answer: Answer, shape: TextShape, on_failure: Callable[[], None]):
        self._answer = answer
        self._events = events_of(answer, shape, on_failure)
        super().__init__(self._events, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with contextlib.aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._answer.end()


async def events_of(
    answer: Answer, shape: TextShape, on_failure: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, several at once where they come together. An exception is the last
    one, in the shape of an error."""
    try:
        if opening := shape.opening():
            yield b"".join(map(event, opening))
        async for pieces in answer.pieces(PATIENCE):
            yield b"".join(map(event, shape.chunks(pieces))) or b": waiting\n\n"
        yield b"".join(map(event, shape.closing(answer.so_far))) + b"data: [DONE]\n\n"
    except Exception as error:
        answered = as_api_error(error)
        if answered.status >= 500:
            on_failure()
        yield event(answered.body)


def event(data: dict[str, Any]) -> bytes:
    """One event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
