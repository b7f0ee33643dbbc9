"""Determines which process of a job this is, and does what processes do together: print a line
once, exchange texts, and write one folder.

This is the only module that asks which process this is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.atomic import part_folder, replacing

# JAX is imported only where it is needed: a file job determines its host without it.

AUTO = "auto"

LAUNCHERS: dict[str, tuple[str | None, str]] = {
    "JAX": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "an Indexed Job of Kubernetes": (None, "JOB_COMPLETION_INDEX"),
    "a TPU pod": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
"""The variables with the number of processes (or their names) and this one's index, from 0."""


@dataclasses.dataclass(frozen=True)
class Host:
    """One of the processes that share a job.

    Attributes:
      index: its number, from 0.
      count: how many there are.
    """

    index: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"host {self.index} of {self.count}"


@dataclasses.dataclass(frozen=True)
class Processes(Host):
    """This process among those of JAX's runtime, which can wait for one another.

    Attributes:
      all_true: waits until every process has called it; returns whether all passed True.
    """

    all_true: Callable[[bool], bool] = bool


ALONE = Processes()

SEEN_WITHIN_S = 60.0
"""How long a process looks for what another has written: some file systems show it late."""
MEETING_MS = 24 * 3600 * 1000
"""How long a process waits for the others; if one has died, JAX itself ends the wait."""


# --- who am I ------------------------------------------------------------------------------


def find_host(
    count: str | None,
    index: int | None,
    environment: Mapping[str, str] = os.environ,
    *,
    flags: tuple[str, str] = ("--num-hosts", "--host-id"),
) -> Host:
    """Determines which process this is, from the command line or the launcher's variables.

    Args:
      count: number of hosts, or `AUTO` to read it from the environment; None for one host.
      index: this host's index, from 0; None reads it from the environment if there are several.
      flags: the command line's names for the two, for messages.

    Raises:
      InputError: the numbers do not fit together, or are missing.
    """
    if count is None:
        if index is not None:
            raise InputError(f"{flags[1]} goes with {flags[0]}")
        return Host()
    launchers = list(LAUNCHERS.values())
    if count == AUTO:
        launchers = [names for names in launchers if names[0] and environment.get(names[0])][:1]
        if not launchers:
            variables = ", ".join(variable for variable, _ in LAUNCHERS.values() if variable)
            raise InputError(f"{flags[0]} auto: none of {variables} is set; give the number")
        value = environment[str(launchers[0][0])]
        hosts = int(value) if value.isdecimal() else len(value.split(","))
    elif count.isdecimal() and int(count):
        hosts = int(count)
    else:
        raise InputError(f"{flags[0]}: expected a number of at least 1, or auto, not {count!r}")
    if index is None and hosts > 1:
        values = [environment.get(variable, "") for _, variable in launchers]
        index = next((int(value) for value in values if value.isdecimal()), None)
        if index is None:
            variables = ", ".join(variable for _, variable in launchers)
            raise InputError(f"{flags[1]} is missing, and none of {variables} is set")
    index = index or 0
    if not 0 <= index < hosts:
        raise InputError(f"{flags[1]}: expected 0 to {hosts - 1}, not {index}")
    return Host(index, hosts)


def connect(coordinator: str | None = None, host: Host | None = None) -> None:
    """Joins the processes of a run. Must be called before JAX's devices are used.

    Args:
      coordinator: HOST:PORT on which process 0 listens; None lets JAX find it.
      host: which process this is; None lets JAX determine it.

    Raises:
      InputError: the arguments do not fit together.
      StorageFailure: the processes do not find one another.
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    count, index = (None, None) if host is None else (host.count, host.index)
    try:
        jax.distributed.initialize(coordinator, count, index)
    except ValueError as error:
        raise InputError(f"the processes cannot find one another: {error}") from None
    except RuntimeError as error:  # perhaps one of them was late
        raise StorageFailure(f"the processes did not find one another: {error}") from None


def jax_processes() -> Processes:
    """Returns this process among those of JAX's runtime; `ALONE` if there is only one."""
    import jax

    if jax.process_count() == 1:
        return ALONE
    return Processes(jax.process_index(), jax.process_count(), _all_true)


def is_first() -> bool:
    """Returns whether this process prints, and does what is done only once."""
    import jax

    return jax.process_index() == 0


# --- together ------------------------------------------------------------------------------


def _all_true(mine: bool) -> bool:
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def sum_over_all(mine: np.ndarray) -> np.ndarray:
    """Returns the sum of every process's array, in each of them; all must call this."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return mine
    return np.sum(multihost_utils.process_allgather(mine), axis=0)


def texts_of_all(mine: str) -> list[str]:
    """Returns every process's text, in order, in each of them; all must call this.

    The texts go through the coordinator, not the devices, which work together only if all processes
    run the same program.
    """
    service = coordinator()
    return [mine] if service is None else service.texts(mine)


def text_of_first(mine: str) -> str:
    """Returns process 0's text in each process; all must call this."""
    return texts_of_all(mine)[0]


def answer_of_first(mine: bool) -> bool:
    """Returns process 0's answer in each process; all must call this."""
    return bool(text_of_first("yes" if mine else ""))


def fail_together(failure: str, kind: type[Exception] = StorageFailure) -> None:
    """Raises in every process if any of them reports a failure; all must call this.

    Args:
      failure: a sentence; empty if there was none.
      kind: class of the exception; its message has the sentences of all processes that failed.
    """
    texts = texts_of_all(failure)
    if len(set(texts)) > 1:
        texts = [text and f"host {i} of {len(texts)}: {text}" for i, text in enumerate(texts)]
    if any(texts):
        raise kind("; ".join(dict.fromkeys(filter(None, texts))))


class Coordinator:
    """The service that `jax.distributed` started, as a store for texts. It needs no device, and
    storing or reading a text does not wait for other processes.

    Attributes:
      index, count: index of this process, and number of processes.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client, self.index, self.count, self._met = client, index, count, 0

    def post(self, place: str, text: str) -> None:
        """Stores this process's text at a place, where it must not have stored one before."""
        self._client.key_value_set(f"wedlm/{place}/{self.index}", text)

    def posts(self, place: str) -> dict[int, str]:
        """Returns the texts that processes have stored at a place so far, by process index."""
        found = self._client.key_value_dir_get(f"wedlm/{place}/")
        return {int(name.rpartition("/")[2]): text for name, text in found}

    def texts(self, mine: str) -> list[str]:
        """Implements `texts_of_all`; waits for all processes."""
        before, self._met = f"wedlm/texts/{self._met}/", self._met + 1
        place = f"texts/{self._met}"
        self.post(place, mine)
        self._client.wait_at_barrier(f"wedlm/{place}", MEETING_MS)
        found = self.posts(place)
        if self.index == 0:  # every process that got here has read the previous texts
            self._client.key_value_delete(before)
        return [found[index] for index in range(self.count)]


def coordinator() -> Coordinator | None:
    """Returns the coordinator of this process's job; None for a single process."""
    from jax._src.distributed import global_state  # JAX has no public access to it

    client = global_state.client
    if client is None or global_state.num_processes == 1:
        return None
    return _coordinator_of(client, global_state.process_id, global_state.num_processes)


_coordinator_of = functools.cache(Coordinator)
"""One per client, because it counts the meetings."""


def say(text: str) -> None:
    """Prints a line, once in a job of several processes."""
    if is_first():
        print(text, flush=True)


@contextlib.contextmanager
def replacing_together(folder: str | Path, processes: Processes) -> Iterator[Path]:
    """Does what `replacing` does, for several processes: all write, then process 0 swaps folders.

    The folder is replaced only if every process's block succeeded, and no process continues before
    that is settled. All must see the same file system.

    Raises:
      InputError, StorageFailure: as in `replacing`, or another process failed in this way; its own
        error says why.
    """
    with contextlib.ExitStack() as stack:
        failure: Exception | None = None
        if processes.index == 0:
            try:
                stack.enter_context(replacing(folder))
            except (InputError, StorageFailure) as error:
                failure = error
        _settle(folder, processes, failure)
        try:
            yield part_folder(folder)
        except Exception as error:
            failure = error
        _settle(folder, processes, failure)
        try:
            stack.close()
        except (OSError, StorageFailure) as error:
            failure = error
        _settle(folder, processes, failure)


def _settle(folder: str | Path, processes: Processes, failure: Exception | None) -> None:
    """Waits for all processes; raises if one of them failed."""
    well = processes.all_true(failure is None)
    if well:
        return
    # All end with the status of the one that failed, since a launcher may see any of them.
    lasting = processes.all_true(failure is None or isinstance(failure, InputError))
    if failure is not None:
        raise failure
    kind = InputError if lasting else StorageFailure
    raise kind(f"{folder}: not written, because another process of the job failed")
