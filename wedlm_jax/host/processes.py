"""Finds out which process of a job this is, and does what processes do together: print a line once,
exchange texts, and write one folder.

The one place that asks which process this is.
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

# JAX is imported by what needs it: a file job finds out which host it is without.

AUTO = "auto"

Variables = tuple[str | None, str]

LAUNCHERS: dict[str, Variables] = {
    "JAX": ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),
    "an Indexed Job of Kubernetes": (None, "JOB_COMPLETION_INDEX"),
    "a TPU pod": ("TPU_WORKER_HOSTNAMES", "TPU_WORKER_ID"),
    "Slurm": ("SLURM_NTASKS", "SLURM_PROCID"),
    "Open MPI": ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
}
"""The variables with the number of processes (or their names) and this one's, from 0."""


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
      all_true: waits until every process has called it; whether all of them said True.
    """

    all_true: Callable[[bool], bool] = bool


ALONE = Processes()

SEEN_WITHIN_S = 60.0
"""How long a process looks for what another has written: some file systems tell of it late."""
MEETING_MS = 24 * 3600 * 1000
"""How long one waits for another to come; for one that died, JAX itself ends the wait."""


# --- who am I ------------------------------------------------------------------------------


def find_host(
    count: str | None,
    index: int | None,
    environment: Mapping[str, str] = os.environ,
    *,
    flags: tuple[str, str] = ("--num-hosts", "--host-id"),
) -> Host:
    """Finds out which process this is, from what the command line or the launcher says.

    Args:
      count: a number, or `AUTO` to ask the environment; None is one host.
      index: from 0; None asks the environment, where there are several hosts.
      flags: what the command line calls the two, for messages.

    Raises:
      InputError: numbers that do not fit, or that nothing tells.
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
        told = environment[str(launchers[0][0])]
        hosts = int(told) if told.isdecimal() else len(told.split(","))
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
    """Joins the processes of a run. Must be called before JAX's devices are.

    Args:
      coordinator: HOST:PORT on which process 0 listens; None leaves it to JAX to find out.
      host: which process this is; None leaves that, too.

    Raises:
      InputError: arguments that do not fit.
      StorageFailure: they do not find one another.
    """
    import jax

    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    where: dict[str, Any] = {}
    if coordinator is not None:
        where["coordinator_address"] = coordinator
    if host is not None:
        where |= {"num_processes": host.count, "process_id": host.index}
    try:
        jax.distributed.initialize(**where)
    except ValueError as error:
        raise InputError(f"the processes cannot find one another: {error}") from None
    except RuntimeError as error:  # perhaps one of them was late
        raise StorageFailure(f"the processes did not find one another: {error}") from None


def jax_processes() -> Processes:
    """Returns this process among those of JAX's runtime; `ALONE` where there is none."""
    import jax

    if jax.process_count() == 1:
        return ALONE
    return Processes(jax.process_index(), jax.process_count(), _all_true)


def is_first() -> bool:
    """Returns whether this process is the one that speaks and does what is done once."""
    import jax

    return jax.process_index() == 0


# --- together ------------------------------------------------------------------------------


def _all_true(mine: bool) -> bool:
    from jax.experimental import multihost_utils

    return bool(np.all(multihost_utils.process_allgather(np.array(mine))))


def sum_over_all(mine: np.ndarray) -> np.ndarray:
    """Returns the sum of every process's array, in each of them; all have to call this."""
    import jax
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        return mine
    return np.sum(multihost_utils.process_allgather(mine), axis=0)


def texts_of_all(mine: str) -> list[str]:
    """Returns every process's text, in their order, in each of them; all have to call this.

    The coordinator carries them, not the devices, which compute together only where all processes
    run the same program.
    """
    service = coordinator()
    return [mine] if service is None else service.texts(mine)


def text_of_first(mine: str) -> str:
    """Returns process 0's text in each of them; all have to call this."""
    return texts_of_all(mine)[0]


def fail_together(failure: str, kind: type[Exception] = StorageFailure) -> None:
    """Raises in every process when one of them gives a failure; all have to call this.

    Args:
      failure: a sentence; empty where there was none.
      kind: class of the exception, whose message has the sentences of all that failed.
    """
    texts = texts_of_all(failure)
    if len(set(texts)) > 1:
        texts = [text and f"host {i} of {len(texts)}: {text}" for i, text in enumerate(texts)]
    if any(texts):
        raise kind("; ".join(dict.fromkeys(filter(None, texts))))


class Coordinator:
    """The service that `jax.distributed` started, as a place where processes leave texts. It asks
    no device, and no process has to come to it.

    Attributes:
      index, count: this process, of how many.
    """

    def __init__(self, client: Any, index: int, count: int):
        self._client, self.index, self.count, self._met = client, index, count, 0

    def post(self, place: str, text: str) -> None:
        """Leaves this process's text at a place where it has left none."""
        self._client.key_value_set(f"wedlm/{place}/{self.index}", text)

    def posts(self, place: str) -> dict[int, str]:
        """Returns what processes have left there until now, by their numbers."""
        found = self._client.key_value_dir_get(f"wedlm/{place}/")
        return {int(name.rpartition("/")[2]): text for name, text in found}

    def texts(self, mine: str) -> list[str]:
        """Does what `texts_of_all` does."""
        before, self._met = f"wedlm/texts/{self._met}/", self._met + 1
        place = f"texts/{self._met}"
        self.post(place, mine)
        self._client.wait_at_barrier(f"wedlm/{place}", MEETING_MS)
        found = self.posts(place)
        if self.index == 0:  # whoever has come here has read what was said before
            self._client.key_value_delete(before)
        return [found[index] for index in range(self.count)]


def coordinator() -> Coordinator | None:
    """Returns that of this process's job; None for a process alone."""
    from jax._src.distributed import global_state  # JAX has no other way to it

    client = global_state.client
    if client is None or global_state.num_processes == 1:
        return None
    return _coordinator_of(client, global_state.process_id, global_state.num_processes)


_coordinator_of = functools.cache(Coordinator)
"""One for each client, because it counts the meetings."""


def say(text: str) -> None:
    """Prints a line, once in a job of several processes."""
    if is_first():
        print(text, flush=True)


@contextlib.contextmanager
def replacing_together(folder: str | Path, processes: Processes) -> Iterator[Path]:
    """Does what `replacing` does by several processes: all write, then process 0 swaps the folders.

    The folder is replaced if every process ended its block well, and by none if one failed;
    none goes on before that is settled. All of them have to see one file system.

    Raises:
      InputError, StorageFailure: as in `replacing`; or another process failed so, whose own error
        tells why.
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
    """Waits for all; raises where one failed."""
    well = processes.all_true(failure is None)
    if well:
        return
    # That all of them end with the status of the one that failed: a launcher sees any of them.
    lasting = processes.all_true(failure is None or isinstance(failure, InputError))
    if failure is not None:
        raise failure
    kind = InputError if lasting else StorageFailure
    raise kind(f"{folder}: not written, because another process of the job failed")
