"""Several processes in one run: how they find one another, and stop together.

`wedlm_jax.host.processes` has what else they do together.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from typing import Any, NoReturn, Self

import jax
from jax.experimental import multihost_utils

from wedlm_jax.errors import FAULT, INTERRUPTED, InputError, exit_status
from wedlm_jax.host.processes import AUTO, connect, coordinator, find_host, jax_processes
from wedlm_jax.host.signals import StopRequest, signal_thread

ENDED = "ended"
"""The key under which processes report that they failed, and why."""
ASK_EVERY_S = 0.5
GRACE_S = 60.0
"""How long a process may take to end and write its files after another has ended."""

EXAMPLE = "--coordinator HOST:PORT --num-processes N --process-id I"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts", "one process per host, each started with the same command"
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="find the other processes through the cluster: TPU pod, GKE, Slurm, Open MPI",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="find them through process 0, listening there"
    )
    group.add_argument(
        "--num-processes", type=int, metavar="N", help="with --coordinator [as the launcher says]"
    )
    group.add_argument(
        "--process-id",
        type=int,
        metavar="I",
        help="with --coordinator, from 0 [as the launcher says]",
    )


def join(options: argparse.Namespace) -> None:
    """Joins the processes of the run if the options ask for it. Must be called before JAX's devices
    are used.

    Raises:
      InputError: options that exclude each other, or a cluster that is not recognised.
    """
    numbers = (options.num_processes, options.process_id)
    if options.coordinator is None:
        if any(number is not None for number in numbers):
            raise InputError(f"--num-processes and --process-id go with --coordinator: {EXAMPLE}")
        if options.distributed:
            connect()
        return
    if options.distributed:
        raise InputError("--distributed finds the coordinator itself; leave --coordinator out")
    count = AUTO if options.num_processes is None else str(options.num_processes)
    flags = ("--num-processes", "--process-id")
    connect(options.coordinator, find_host(count, options.process_id, flags=flags))


AT_ONCE_S = 3.0
"""How long a process may take to end after a second Ctrl-C."""


def _end_at_once() -> None:
    if sys.stderr.isatty():
        sys.stderr.write("\x1b[?25h")  # the cursor, which a bar hides
        sys.stderr.flush()
    os._exit(INTERRUPTED)


class AgreedStop(StopRequest):
    """Stops all processes of a run after the same step, when one receives SIGTERM or Ctrl-C.

    They agree through the coordinator that `jax.distributed` started. A message says at once how a
    signal is handled. A single process ends within `AT_ONCE_S` of a second Ctrl-C in any case.
    """

    def __init__(self) -> None:
        self._told, self._heard = contextlib.ExitStack(), 0
        self._end: threading.Timer | None = None
        self._alone = jax_processes().count == 1
        # With several processes the coordinator itself handles SIGTERM.
        ours = (signal.SIGTERM, signal.SIGINT) if self._alone else (signal.SIGINT,)
        super().__init__(*ours)

    def note(self) -> None:
        super().note()
        if not self._alone:
            os.kill(os.getpid(), signal.SIGTERM)

    def __enter__(self) -> Self:
        super().__enter__()
        if self._signals:
            self._told.enter_context(signal_thread(self._tell))
        return self

    def __exit__(self, *error: object) -> None:
        self._told.close()
        if self._end is not None:
            self._end.cancel()
        super().__exit__(*error)

    def _tell(self, number: int) -> None:
        if number not in self._signals:
            return
        self._heard += 1
        if self._heard == 1:
            again = "; Ctrl-C again stops at once" if number == signal.SIGINT else ""
            line = "stopping when the step under way is done and the state is saved"
            print(f"{line}{again}", file=sys.stderr, flush=True)
        elif number == signal.SIGINT and self._end is None:
            print("stopping at once", file=sys.stderr, flush=True)
            if self._alone:
                self._end = threading.Timer(AT_ONCE_S, _end_at_once)
                self._end.daemon = True
                self._end.start()

    @property
    def now(self) -> bool:
        """Whether this process should stop and may do so alone, before the end of the step."""
        return self._alone and self.requested

    def after(self, step: int) -> bool:
        """Returns whether the run should stop after ``step`` completed steps. Every process calls
        this once after every step."""
        if self._alone:
            return self.requested
        return multihost_utils.reached_preemption_sync_point(step)


class EndTogether:
    """Ends all processes of a run when one of them fails alone: on input that only it has, a row
    that only it reads, or storage that only it cannot reach.

    The others may be in a joint computation, and their devices would wait for the missing one
    forever. So a thread in each process asks the coordinator regularly whether another process has
    failed; if so, it prints why and ends its process with the same status. An error that all
    processes see ends each of them by itself, within `GRACE_S`.
    """

    def __init__(self) -> None:
        self._service = coordinator()
        self._over, self._one_at_a_time = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._watch, name="end-together", daemon=True)

    def __enter__(self) -> Self:
        if self._service is not None:
            self._thread.start()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if self._service is None:
            return
        if error is not None:
            expected = exit_status(error) != FAULT
            if not expected and (failures := self._failures_of_others()):
                self._end(failures)  # this error is a consequence of theirs
            text = " ".join(str(error).split()) or "interrupted"
            if not expected:
                text = f"{type(error).__name__}: {text}"
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # it may be gone itself
                self._service.post(ENDED, f"{exit_status(error)} {text}")
        self._over.set()
        self._thread.join()
        _leave()

    def _watch(self) -> None:
        while not self._over.wait(ASK_EVERY_S):
            if failures := self._failures_of_others():
                # After a second Ctrl-C there is no grace.
                at_once = any(text.startswith(f"{INTERRUPTED} ") for text in failures.values())
                if not self._over.wait(0 if at_once else GRACE_S):
                    self._end(failures)
                return

    def _failures_of_others(self) -> dict[int, str]:
        assert self._service is not None
        try:
            failures = self._service.posts(ENDED)
        except jax.errors.JaxRuntimeError:
            return {}  # without a coordinator JAX itself ends the process
        return {index: text for index, text in failures.items() if index != self._service.index}

    def _end(self, failures: dict[int, str]) -> NoReturn:
        assert self._service is not None
        with self._one_at_a_time:
            index = min(failures)
            status, _, text = failures[index].partition(" ")
            line = f"wedlm train: host {index} of {self._service.count}: {text}"
            print(line, file=sys.stderr, flush=True)
            sys.stdout.flush()
            _leave()
            os._exit(int(status))


def _leave() -> None:
    """Disconnects from the coordinator, together with the other processes or after a timeout. JAX
    aborts processes, with a meaningless status, if another one leaves without disconnecting."""
    with contextlib.suppress(Exception):
        jax.distributed.shutdown()
