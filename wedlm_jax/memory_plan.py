"""Whether a batch fits into the device's memory, told before anything is allocated.

What is counted on one device: its share of the weights, of the cache and of the outputs, and
what the decode loop needs beside them, which the compiler itself says.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from wedlm_jax import programs
from wedlm_jax.batch_sizes import BatchSizes, largest_cache
from wedlm_jax.errors import InputError
from wedlm_jax.row_params import idle_params
from wedlm_jax.sampling import RowParams

if TYPE_CHECKING:
    from wedlm_jax.engine import Engine

GIB = 2**30
WORTH_ASKING = 0.5
"""Share of the memory below which a batch fits without asking the compiler."""
USABLE = 0.95
"""Share of the memory that a batch may take; the rest is for prefill and fragments."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device.

    Attributes:
      weights, cache: this device's share.
      working: what the decode loop needs beside them; 0 where it was not asked for.
      limit: what the device has; None where that is not known.
    """

    weights: int
    cache: int
    working: int
    limit: int | None

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.working


def plan_memory(engine: Engine, sizes: BatchSizes, *, ask_compiler: bool) -> MemoryPlan:
    """What a batch of these sizes takes.

    Args:
      ask_compiler: whether to compile the decode loop for its working memory. On a mesh it is
        not asked: there it is known only when the loop runs.
    """
    mesh = jax.sharding.get_abstract_mesh()
    devices = 1 if mesh.empty else mesh.size
    state = engine.shapes_of(sizes)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    working = 0
    if ask_compiler and mesh.empty:
        params = RowParams(**{
            name: jax.ShapeDtypeStruct(value.shape, value.dtype)
            for name, value in idle_params(sizes, 0).items()
        })  # type: ignore[arg-type]  # fmt: skip
        number = jax.ShapeDtypeStruct((), jnp.int32)
        loop = engine.compiled(
            programs.advance_state, state, params, number, number, windows=engine.windows,
            refill=engine.refill, live=sizes.cache_size, attention=engine.attention,
        )  # fmt: skip
        analysis = loop.memory_analysis()
        working = 0 if analysis is None else analysis.temp_size_in_bytes
    return MemoryPlan(engine.parameter_bytes, size // devices, working, device_memory())


def check_memory(engine: Engine, sizes: BatchSizes) -> None:
    """Refuses a batch that does not fit.

    Raises:
      InputError: with the numbers, and how many rows fit.
    """
    plan = plan_memory(engine, sizes, ask_compiler=False)
    limit = plan.limit
    if limit is None or plan.total <= WORTH_ASKING * limit:
        return
    usable = USABLE * limit
    if plan.total <= usable:
        plan = plan_memory(engine, sizes, ask_compiler=True)
    if plan.total <= usable:
        return
    each = (plan.cache + plan.working) / sizes.rows
    fitting = max(int((usable - plan.weights) / each), 0)
    if not fitting:
        advice = "not even one row fits; shorten max_tokens"
    else:
        advice = f"{fitting:,} rows fit (max_batch_size)"
        tokens = fitting * sizes.cache_size
        if tokens >= largest_cache(engine):
            advice += f", or more of shorter prompts with max_cache_tokens {tokens:,}"
    raise InputError(
        f"{sizes.rows:,} rows of {sizes.cache_size:,} tokens need {plan.total / GIB:.2f} GiB on a "
        f"device (weights {plan.weights / GIB:.2f}, cache {plan.cache / GIB:.2f}, working memory "
        f"{plan.working / GIB:.2f}), which has {limit / GIB:.2f}: {advice}"
    )


def device_memory() -> int | None:
    """Bytes that the first device has for us: as it says, or on a CPU what the machine has."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
