"""Connections of clients that are slow, or gone without a word.

uvicorn waits for ever for the head of a request, and for a client that does not read. Both would
keep a socket, and the second an answer's memory.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


def patient_protocol(head_seconds: float, write_seconds: float) -> type[H11Protocol]:
    """Returns uvicorn's protocol, made to close the connections of clients that are too slow.

    Args:
      head_seconds: until the head of a request is there, from the connection's begin or the head's
        first byte on.
      write_seconds: that a client may read nothing of what waits for it.
    """

    class PatientProtocol(H11Protocol):
        def __init__(self, *arguments: Any, **named: Any):
            super().__init__(*arguments, **named)
            self._head = _Timer(head_seconds, self._give_up)
            self._write = _Timer(write_seconds, self._give_up)

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
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
            # Closing would wait for what was written to be read.
            self.transport.abort()

    return PatientProtocol


class _Timer:
    """Calls a function after some time, unless it is stopped before."""

    def __init__(self, seconds: float, call: Any):
        self._seconds, self._call = seconds, call
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Starts, unless it runs already."""
        if self._handle is None:
            loop = asyncio.get_running_loop()
            self._handle = loop.call_later(self._seconds, self._call)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None
