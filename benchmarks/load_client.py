"""Clients of a server on the loopback: a few lines of HTTP, so that they cost little next to it."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class Ask:
    """A streamed call of /v1/completions: the fields of its body, and after how many tokens the
    client disconnects (None for never)."""

    fields: dict[str, Any]
    leave_after: int | None = None


@dataclasses.dataclass
class Heard:
    """What a client received.

    Attributes:
      first: seconds to the first token.
      gaps: seconds between two pieces, divided by the tokens of the second.
      finish_reason: None if the client disconnected.
      error: message of the server or of a broken connection; None if there was none.
    """

    token_ids: list[int] = dataclasses.field(default_factory=list)
    first: float = 0.0
    gaps: list[float] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None


async def ask_all(port: int, asks: Sequence[Ask], clients: int) -> tuple[list[Heard], float]:
    """Sends all requests, ``clients`` at a time; returns the answers and the seconds they took."""
    heard = [Heard() for _ in asks]
    todo = iter(range(len(asks)))
    started = time.perf_counter()
    await asyncio.gather(*(_client(port, asks, heard, todo) for _ in range(clients)))
    return heard, time.perf_counter() - started


async def _client(port: int, asks: Sequence[Ask], heard: list[Heard], todo: Iterator[int]) -> None:
    """Makes calls one after another, over one connection for as long as it stays open."""
    connection = None
    for number in todo:
        if connection is None:
            connection = await asyncio.open_connection("127.0.0.1", port)
        try:
            await _ask(*connection, asks[number], heard[number])
        except (ConnectionError, asyncio.IncompleteReadError, ValueError) as error:
            heard[number].error = f"{type(error).__name__}: {error}"
        if heard[number].finish_reason is None:
            connection[1].close()
            connection = None
    if connection is not None:
        connection[1].close()


async def _ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, ask: Ask, heard: Heard
) -> None:
    body = json.dumps(ask.fields | {"stream": True, "return_token_ids": True}).encode()
    started = last = time.perf_counter()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        heard.error = head.decode(errors="replace")
        return
    async for data in _events(reader):
        now = time.perf_counter()
        if "error" in data:
            heard.error = data["error"]["message"]
            return
        (choice,) = data["choices"]
        new = choice["token_ids"]
        if new and not heard.token_ids:
            heard.first = now - started
        elif new:
            heard.gaps.append((now - last) / len(new))
        last = now
        heard.token_ids += new
        if ask.leave_after is not None and len(heard.token_ids) >= ask.leave_after:
            return
        heard.finish_reason = choice["finish_reason"]


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Yields the events of a chunked response."""
    while size := int(await reader.readline(), 16):
        chunk = await reader.readexactly(size + 2)
        for line in chunk.split(b"\n"):
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    await reader.readexactly(2)
