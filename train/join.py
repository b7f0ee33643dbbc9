"""Several hosts in one run: how their processes find one another, and the options that say so.

What they do together then is `wedlm_jax.processes`'s.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import jax

from wedlm_jax.errors import InputError

EXAMPLE = "--coordinator HOST:PORT --num-processes N --process-id I"


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several hosts", "one process a host, each started with the same command"
    )
    group.add_argument(
        "--distributed",
        action="store_true",
        help="find the other processes through the cluster: TPU pod, GKE, Slurm, Open MPI",
    )
    group.add_argument(
        "--coordinator", metavar="HOST:PORT", help="find them through process 0, listening there"
    )
    group.add_argument("--num-processes", type=int, metavar="N", help="with --coordinator")
    group.add_argument("--process-id", type=int, metavar="I", help="with --coordinator, from 0")


def join(options: argparse.Namespace) -> None:
    """Joins the processes of the run, where the options ask for it. Must be called before
    JAX's devices are.

    Raises:
      InputError: options that do not go together, or a cluster that JAX does not recognise.
    """
    numbers = (options.num_processes, options.process_id)
    if options.coordinator is None:
        if any(number is not None for number in numbers):
            raise InputError(f"--num-processes and --process-id go with --coordinator: {EXAMPLE}")
        if options.distributed:
            _initialize()
        return
    if options.distributed or any(number is None for number in numbers):
        raise InputError(f"--coordinator needs both other numbers: {EXAMPLE}")
    if not 0 <= options.process_id < options.num_processes:
        raise InputError(
            f"--process-id: expected 0 to {options.num_processes - 1}, not {options.process_id}"
        )
    _initialize(
        coordinator_address=options.coordinator,
        num_processes=options.num_processes,
        process_id=options.process_id,
    )


def _initialize(**where: Any) -> None:
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(**where)
    except (RuntimeError, ValueError) as error:
        raise InputError(f"the processes did not find one another: {error}") from None
