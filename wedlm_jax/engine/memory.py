"""How many pages fit beside the weights and the largest compiled program."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax

from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import shards

GIB = 2**30
USABLE = 0.95
"""Share of an accelerator's memory that is planned with; the rest goes to fragments."""
CPU_SHARE = 0.3
"""Share of a machine's memory that pages may take on a CPU, where other programs live, too."""
SPARE = 1.5
"""Pages beyond those that all sequences at full length need, for prefixes that are kept. On a CPU
these are counted in the usual working set; an accelerator gives all it has."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device.

    Attributes:
      weights: of the model, this device's share.
      pages: of keys and values, this device's share.
      working: what the largest compiled program needs beside them.
      limit: what the device has; None where that is not known.
      num_pages: of each replica, the trash page included.
      page_size: tokens a page.
    """

    weights: int
    pages: int
    working: int
    limit: int | None
    num_pages: int
    page_size: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that the pages of a replica hold."""
        return (self.num_pages - 1) * self.page_size

    def __str__(self) -> str:
        parts = (
            f"weights {self.weights / GIB:.2f}, pages {self.pages / GIB:.2f} for "
            f"{self.cached_tokens:,} tokens, working memory {self.working / GIB:.2f}"
        )
        limit = "" if self.limit is None else f" of {self.limit / GIB:.2f}"
        return f"{(self.weights + self.pages + self.working) / GIB:.2f} GiB{limit} ({parts})"


def bytes_per_page(config: ModelConfig, page_size: int, dtype: Any) -> int:
    """Bytes of a page of all layers on one device of the mesh that is set."""
    heads = max(config.num_key_value_heads // shards("heads"), 1)
    numbers = config.num_hidden_layers * page_size * 2 * heads
    size = jax.numpy.dtype(dtype).itemsize
    scale = 4 if jax.numpy.dtype(dtype) == jax.numpy.int8 else 0
    return numbers * (config.head_dim * size + scale)


def parameter_bytes(parameters: Any) -> int:
    """Bytes of the parameters that one device holds."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(parameters)
    )


def plan_pages(
    config: ModelConfig,
    *,
    weights: int,
    working: int,
    page_size: int,
    pages_per_sequence: int,
    sequences: int,
    dtype: Any,
    limit: int | None = None,
) -> MemoryPlan:
    """Plans the pages of a replica: all that the device has left on an accelerator, and on a CPU
    what the sequences can use.

    Args:
      weights, working: bytes on a device that are taken.
      pages_per_sequence: pages of the longest sequence.
      sequences: N, that decode together.
      limit: bytes of a device; by default what it says.

    Raises:
      InputError: not even one sequence of full length fits; with the numbers.
    """
    each = bytes_per_page(config, page_size, dtype)
    own_limit = device_memory() if limit is None else limit
    wanted = math.ceil(SPARE * sequences * pages_per_sequence) + 1
    fitting = wanted
    if own_limit is not None:
        on_cpu = limit is None and jax.default_backend() == "cpu"
        left = CPU_SHARE * own_limit if on_cpu else USABLE * own_limit - weights - working
        fitting = max(int(left // each), 0)
    # More pages than text in all sequences and their prefixes are of little use to anybody.
    num_pages = min(fitting, 4 * wanted if jax.default_backend() != "cpu" else wanted)
    plan = MemoryPlan(weights, num_pages * each, working, own_limit, num_pages, page_size)
    if num_pages < pages_per_sequence + 1:
        needed = (pages_per_sequence + 1) * each
        raise InputError(
            f"a sequence of {pages_per_sequence * page_size:,} tokens needs pages of "
            f"{needed / GIB:.2f} GiB on a device, which has {(own_limit or 0) / GIB:.2f} GiB "
            f"(weights {weights / GIB:.2f}, working memory {working / GIB:.2f}): lower "
            "max_model_len"
        )
    return plan


def device_memory() -> int | None:
    """Bytes that the first device has for us: as it says, or on a CPU what the machine has."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
