"""Handles signals, so that an interrupted program ends well; the one place that does.

Python runs a signal's handler in the main thread, between two of its own instructions. A compiler
has none for half a minute, so the main thread leaves compiling to another one and waits, which a
handler interrupts. What it raises then ends the command as any exception does: files are closed,
the terminal is put right, a job says what is kept. Only the compiler cannot be ended, so that the
process is (`exit_process`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, NoReturn, Self, TypeVar

from wedlm_jax.errors import TERMINATED, CompilingInterrupted

T = TypeVar("T")

_compiling: list[threading.Thread] = []
"""Threads that compile for the main thread, which waits for the last, if it waits."""
_elsewhere: set[object] = set()
"""One for each block of `beside_main_thread` that is under way."""
_waits = False
"""Whether the main thread waits for a compiler."""
_open: list[StopRequest] = []
"""Those that note signals now."""


def compiled(compile: Callable[[], T]) -> T:
    """Returns the result of ``compile``, a call that does not return to Python for long and leaves
    nothing half-done if the process ends in it.

    Raises:
      CompilingInterrupted: Ctrl-C, or another signal that a `StopRequest` handles, has come to the
        main thread in the meantime, or before: while a program was traced, which takes as long.
      Exception: whatever ``compile`` raises.
    """
    global _waits
    if threading.current_thread() is not threading.main_thread():
        with beside_main_thread():
            return compile()
    done: Future[T] = Future()

    def work() -> None:
        try:
            done.set_result(compile())
        except BaseException as error:
            done.set_exception(error)

    # No daemon: where a library's user is interrupted and ends Python, it waits for the thread,
    # because XLA does not survive that the interpreter ends under it.
    thread = threading.Thread(target=work, name="compile")
    try:
        _waits = True
        for request in _open:
            if request.requested:
                raise CompilingInterrupted(request.status)
        _compiling[:] = [one for one in _compiling if one.is_alive()]
        _compiling.append(thread)
        thread.start()
        return done.result()
    except CompilingInterrupted:
        raise
    except KeyboardInterrupt:
        raise CompilingInterrupted from None
    finally:
        _waits = False


@contextlib.contextmanager
def beside_main_thread() -> Iterator[None]:
    """Marks a block in another thread that may not return to Python for long, as where programs are
    traced and compiled; what it does is worth nothing once the command is over."""
    mine = object()
    _elsewhere.add(mine)
    try:
        yield
    finally:
        _elsewhere.discard(mine)


def exit_process(status: int) -> NoReturn:
    """Ends the process, whose command has nothing left to do; at once, without what Python does at
    its exit, if a program is still being compiled for a main thread that was interrupted, or in a
    block of `beside_main_thread`."""
    if _elsewhere or any(thread.is_alive() for thread in _compiling):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def signal_thread(tell: Callable[[int], None]) -> Iterator[None]:
    """Calls ``tell`` with the number of each signal that Python handles as soon as it comes, from a
    thread of its own: a handler waits until the main thread is back from what it computes. To be
    entered in the main thread."""
    reads, writes = socket.socketpair()
    writes.setblocking(False)

    def listen() -> None:
        while number := reads.recv(1):
            tell(number[0])

    thread = threading.Thread(target=listen, name="signals", daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writes.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        writes.close()
        thread.join()
        reads.close()


class StopRequest:
    """Notes a signal while it is open; one that comes before or while the main thread waits for a
    compiler (`compiled`) is raised there, as `CompilingInterrupted`.

    Args:
      signals: others to note instead. Beside another, Ctrl-C (SIGINT) is noted once, and a second
        one interrupts; alone it is noted as often as it comes.

    Attributes:
      requested: whether one has come.
      status: the exit status that tells which: 128 and its number.
    """

    def __init__(self, *signals: signal.Signals) -> None:
        self.requested, self.status = False, TERMINATED
        # Only the main thread can handle signals; elsewhere, as in a Ray actor, the host program
        # does.
        main = threading.current_thread() is threading.main_thread()
        self._signals = (signals or (signal.SIGTERM,)) if main else ()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._before = {one: signal.signal(one, self._handle) for one in self._signals}
        _open.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _open.remove(self)
        for one, before in self._before.items():
            signal.signal(one, before)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.status = 128 + number
        if number == signal.SIGINT and len(self._signals) > 1:
            signal.signal(number, signal.default_int_handler)
        self.note()
        if _waits:
            raise CompilingInterrupted(self.status)

    def note(self) -> None:
        """Notes that a signal has arrived."""
        self.requested = True
