"""The processes of one job, where they act together: who speaks and does what is done once,
waiting for one another, and writing one folder.

The one place that asks which process this is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from wedlm_jax.atomic import part_folder, replacing
from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Processes:
    """This process among the others.

    Attributes:
      index: its number; 0 does what is done once (`is_first`).
      count: how many there are.
      all_true: waits until every process has called it; whether all of them said True.
    """

    index: int
    count: int
    all_true: Callable[[bool], bool]


ALONE = Processes(0, 1, lambda mine: mine)


def jax_processes() -> Processes:
    """Those of JAX's distributed runtime; `ALONE` where there is none."""
    if jax.process_count() == 1:
        return ALONE
    return Processes(jax.process_index(), jax.process_count(), _all_true)


def _all_true(mine: bool) -> bool:
    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def sum_over_all(mine: np.ndarray) -> np.ndarray:
    """The sum of every process's array, in each of them; all have to call this."""
    if jax.process_count() == 1:
        return mine
    return np.sum(multihost_utils.process_allgather(mine), axis=0)


def is_first() -> bool:
    """Whether this process is the one that speaks and does what is done once."""
    return jax.process_index() == 0


def say(text: str) -> None:
    """Prints a line, once in a job of several processes."""
    if is_first():
        print(text, flush=True)


def wait_for_all(reason: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(reason)


@contextlib.contextmanager
def replacing_together(folder: str | Path, processes: Processes) -> Iterator[Path]:
    """`replacing`, by several processes: all write, then process 0 swaps the folders.

    The folder is replaced if every process ended its block well, and by none if one failed;
    none goes on before that is settled. All of them have to see one file system.

    Raises:
      InputError: as in `replacing`; or another process failed, whose own error tells why.
    """
    with contextlib.ExitStack() as stack:
        failure: Exception | None = None
        if processes.index == 0:
            try:
                stack.enter_context(replacing(folder))
            except InputError as error:
                failure = error
        _settle(folder, processes, failure)
        try:
            yield part_folder(folder)
        except Exception as error:
            failure = error
        _settle(folder, processes, failure)
        try:
            stack.close()
        except OSError as error:
            failure = error
        _settle(folder, processes, failure)


def _settle(folder: str | Path, processes: Processes, failure: Exception | None) -> None:
    """Waits for all; raises where one failed."""
    well = processes.all_true(failure is None)
    if failure is not None:
        raise failure
    if not well:
        raise InputError(f"{folder}: not written, because another process of the job failed")
