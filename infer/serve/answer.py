"""An answer while it is decoded: collects its sequences' events and sends them as a stream."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from infer.serve.calls import Call, Capacity
from infer.serve.errors import ApiError, as_api_error
from infer.serve.metrics import Metrics, SequenceTimes
from infer.serve.served_engine import ServedEngine
from infer.serve.shapes import Piece, TextShape
from infer.trace import SequenceTrace
from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine.interface import Event, TokenDelta, Traced
from wedlm_jax.engine.loop import Caller
from wedlm_jax.generation import Handle, sample_params

if TYPE_CHECKING:
    from wedlm_jax.text import TextCodec

PATIENCE = 15.0
"""Seconds without news after which a stream sends a comment, as a proxy might consider a silent
connection dead."""

DONE = b"data: [DONE]\n\n"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Headers of a stream that make proxies pass on each event at once."""


@dataclasses.dataclass(frozen=True)
class _Choice:
    """A sequence being decoded, with its trace if one is requested."""

    index: int
    handle: Handle
    times: SequenceTimes
    trace: SequenceTrace | None

    def news(self) -> Piece | None:
        """Returns what has come since the last call; None for nothing."""
        chunk = self.handle.piece()
        trace = None if self.trace is None else self.trace.news()
        if chunk is None and trace is not None:
            chunk = Chunk("", [], self.handle.completion)
        return None if chunk is None else Piece(self.index, chunk, trace)


class Answer:
    """Decodes what a call asks for.

    Args:
      codec: the tokenizer, or None.
      burst_seconds: length of the longest burst, after which new requests are admitted. Tokens of
        shorter bursts are delivered together, at most twice in that time; traces, and tokens that
        may complete a stop string, are delivered at once.
    """

    def __init__(
        self,
        call: Call,
        engine: ServedEngine,
        codec: TextCodec | None,
        capacity: Capacity,
        metrics: Metrics,
        *,
        burst_seconds: float,
    ):
        self._call, self._engine, self._codec = call, engine, codec
        self._capacity, self.metrics = capacity, metrics
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        hurried = call.traced or any(params.stop for _, params in call.prompts)
        self._caller = Caller(
            self._events.put_nowait,
            seconds=burst_seconds,
            patience=0.0 if hurried else burst_seconds / 2,
        )
        self._choices: dict[Handle, _Choice] = {}

    def begin(self) -> None:
        """Submits all sequences to the engine. Raises `ApiError` if there is no room for them."""
        call = self._call
        self._capacity.enter(call.num_choices)
        window = self._engine.engine.window_size if call.window is None else call.window
        for token_ids, params in call.prompts:
            for one in sample_params(params):
                handle = Handle(
                    self._engine,
                    self._codec,
                    token_ids,
                    one,
                    self._caller,
                    window=call.window,
                    traced=call.traced,
                    growing=call.streamed,
                )
                trace = None
                if call.traced:
                    trace = SequenceTrace(self._codec, one, len(token_ids), window)
                times, index = SequenceTimes(self.metrics), len(self._choices)
                self._choices[handle] = _Choice(index, handle, times, trace)
        self.metrics.prompt_tokens.inc(call.num_prompt_tokens)
        self._engine.submit([handle.request for handle in self._choices])

    @property
    def is_over(self) -> bool:
        return all(handle.is_over for handle in self._choices)

    def end(self) -> None:
        """Aborts the sequences that have not ended, and ends `pieces`."""
        gone = [handle for handle in self._choices if not handle.is_over]
        if gone:
            self.metrics.aborted.inc(len(gone))
            self._capacity.leave(len(gone))
            for handle in gone:
                handle.abort()
            self._events.put_nowait([])

    async def pieces(self, patience: float) -> AsyncIterator[list[Piece]]:
        """Yields what is new after each step of the engine that produced something, and an empty
        list after each ``patience`` seconds without news."""
        while not self.is_over:
            try:
                async with asyncio.timeout(patience):
                    events = await self._events.get()
            except TimeoutError:
                yield []
                continue
            news = (choice.news() for choice in self._take(events))
            yield [piece for piece in news if piece is not None]

    async def wholes(self) -> list[Piece]:
        """Returns each choice as one piece when all are over. Raises the cause if one failed."""
        while not self.is_over:
            self._take(await self._events.get())
        pieces = []
        for choice in self._choices.values():
            one, trace = choice.handle.completion, choice.trace
            whole = None if trace is None else trace.whole(one.finish_reason)
            pieces.append(Piece(choice.index, Chunk(one.text or "", one.token_ids, one), whole))
        return pieces

    @property
    def so_far(self) -> list[Completion]:
        """The completion of each choice so far."""
        return [handle.completion for handle in self._choices]

    def __str__(self) -> str:
        made = sum(handle.counts.tokens for handle in self._choices)
        return f"{self._call.num_prompt_tokens} tokens in, {made} out"

    def _take(self, events: Sequence[Event]) -> list[_Choice]:
        """Hands events to their choices; returns the choices that may have news."""
        touched: dict[int, _Choice] = {}
        for event in events:
            handle: Handle = event.request.handle
            if handle.is_over:
                continue
            choice = self._choices[handle]
            if isinstance(event, TokenDelta):
                choice.times.note(event)
            elif isinstance(event, Traced) and choice.trace is not None:
                choice.trace.take(event)
            try:
                handle.take(event)
            finally:
                if handle.is_over:
                    self._capacity.leave(1)
            touched[choice.index] = choice
            if handle.is_over:
                choice.times.end(handle.completion)
        return list(touched.values())


class EventStream(StreamingResponse):
    """Sends an answer that has begun as server-sent events; ends it when sending ends for any
    reason."""

    def __init__(self, answer: Answer, shape: TextShape):
        self._answer, self._events = answer, _events_of(answer, shape)
        super().__init__(self._events, media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette's own method makes a task group for each answer; one task is cheaper.
        head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async with ending_with_client(self._answer, receive):
            try:
                async with contextlib.aclosing(self._events):
                    await send(head)
                    async for body in self._events:
                        await send({"type": "http.response.body", "body": body, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
            except asyncio.CancelledError:  # by uvicorn, when the grace period is over
                last = _event(ApiError(503, "the server is shutting down").body) + DONE
                await send({"type": "http.response.body", "body": last, "more_body": False})


@contextlib.asynccontextmanager
async def ending_with_client(answer: Answer, receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """Context manager: ends the answer on exit, or earlier if the client disconnects. Yields a task
    that completes when the client disconnects."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answer.end()

    watching = asyncio.create_task(watch())
    try:
        yield watching
    finally:
        watching.cancel()
        answer.end()


async def _events_of(answer: Answer, shape: TextShape) -> AsyncGenerator[bytes, None]:
    """Yields the events of a stream, joined if they come together. The last event of an answer that
    failed is the error."""
    try:
        if opening := shape.opening():
            yield b"".join(map(_event, opening))
        async for pieces in answer.pieces(PATIENCE):
            chunks = shape.chunks(pieces)
            if answer.is_over:
                chunks += shape.closing(answer.so_far)
            done = DONE if answer.is_over else b""
            yield b"".join(map(_event, chunks)) + done or b": waiting\n\n"
    except Exception as error:
        answered = as_api_error(error)
        if answered.status >= 500:
            answer.metrics.errors.inc()
        yield _event(answered.body)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"
