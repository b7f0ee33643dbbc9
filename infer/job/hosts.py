"""Which of several hosts this one is: said on the command line, or by what launched it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence

from wedlm_jax.errors import InputError

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
    """One of the processes that share a job: shard k is of number k modulo count."""

    number: int = 0
    count: int = 1

    def __str__(self) -> str:
        return f"host {self.number} of {self.count}"


def find_host(
    count: str | None, number: int | None, environment: Mapping[str, str] = os.environ
) -> Host:
    """What ``--num-hosts`` and ``--host-id`` say.

    Args:
      count: a number, or `AUTO` to ask the environment; None is one host.
      number: from 0; None asks the environment, where there are several hosts.

    Raises:
      InputError: numbers that do not fit, or that nothing tells.
    """
    if count is None:
        if number is not None:
            raise InputError("--host-id goes with --num-hosts")
        return Host()
    launchers = list(LAUNCHERS.values())
    if count == AUTO:
        launchers = [names for names in launchers if names[0] and environment.get(names[0])][:1]
    hosts = _told_count(launchers, environment) if count == AUTO else _number(count)
    if number is None and hosts > 1:
        number = _told_number(launchers, environment)
    number = number or 0
    if not 0 <= number < hosts:
        raise InputError(f"--host-id: expected 0 to {hosts - 1}, not {number}")
    return Host(number, hosts)


def _number(count: str) -> int:
    if not count.isdecimal() or int(count) < 1:
        raise InputError(f"--num-hosts: expected a number of at least 1, or auto, not {count!r}")
    return int(count)


def _told_count(launchers: Sequence[Variables], environment: Mapping[str, str]) -> int:
    for variable, _ in launchers:
        if variable is not None:
            value = environment[variable]
            return int(value) if value.isdecimal() else len(value.split(","))
    variables = ", ".join(variable for variable, _ in LAUNCHERS.values() if variable)
    raise InputError(f"--num-hosts auto: none of {variables} is set; give the number")


def _told_number(launchers: Sequence[Variables], environment: Mapping[str, str]) -> int:
    for _, variable in launchers:
        if (value := environment.get(variable, "")).isdecimal():
            return int(value)
    variables = ", ".join(variable for _, variable in launchers)
    raise InputError(f"--host-id is missing, and none of {variables} is set")
