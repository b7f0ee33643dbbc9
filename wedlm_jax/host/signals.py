"""Handles signals, so that an interrupted program ends cleanly; the only module that does.

Python runs a signal's handler in the main thread, between two of its own instructions. A compiler
may run for half a minute without any, so the main thread leaves compiling to another thread and
waits; a handler can interrupt the wait. What it raises then ends the command like any exception:
files are closed, the terminal is restored, a job says what was kept. Only the compiler cannot be
stopped, so the process is ended instead (`exit_process`).
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
"""Threads that compile for the main thread; if it waits, then for the last one."""
_elsewhere: set[object] = set()
"""One object for each `beside_main_thread` block in progress."""
_waits = False
"""Whether the main thread waits for a compiler."""
_open: list[StopRequest] = []
"""The requests that currently record signals."""


def compiled(compile: Callable[[], T]) -> T:
    """Returns the result of ``compile``, a call that does not return to Python for a long time and
    leaves nothing half-done if the process ends during it.

    Raises:
      CompilingInterrupted: Ctrl-C, or another signal that a `StopRequest` handles, has reached the
        main thread in the meantime, or earlier while a program was traced, which takes as long.
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

    # Not a daemon: if a user of the library is interrupted and ends Python, Python waits for the
    # thread, because XLA crashes if the interpreter ends while it compiles.
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
    """Marks a block in another thread that may not return to Python for a long time, such as
    tracing and compiling; its result is worthless once the command is over."""
    mine = object()
    _elsewhere.add(mine)
    try:
        yield
    finally:
        _elsewhere.discard(mine)


def exit_process(status: int) -> NoReturn:
    """Ends the process once its command has nothing left to do. Python's own exit steps are skipped
    if a program is still being compiled for an interrupted main thread, or in a block of
    `beside_main_thread`."""
    if _elsewhere or any(thread.is_alive() for thread in _compiling):
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(status)
    sys.exit(status)


@contextlib.contextmanager
def signal_thread(tell: Callable[[int], None]) -> Iterator[None]:
    """Calls ``tell`` with the number of each signal that Python handles as soon as it arrives, from
    a separate thread: a handler waits until the main thread returns from what it computes. Must be
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
    """Records signals while it is open; a signal that arrives before or while the main thread waits
    for a compiler (`compiled`) is raised there, as `CompilingInterrupted`.

    Args:
      signals: the signals to record; SIGTERM by default. With other signals, Ctrl-C (SIGINT) is
        recorded once, and a second one interrupts; alone, it is recorded every time.

    Attributes:
      requested: whether a signal has arrived.
      status: the exit status for that signal: 128 plus its number.
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
        """Records that a signal has arrived."""
        self.requested = True
