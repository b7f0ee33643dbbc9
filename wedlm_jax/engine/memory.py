"""How many pages fit beside the weights and the largest compiled program."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax

from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.sizes import LARGEST_HEAD
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import shards

GIB = 2**30
USABLE = 0.95
"""Share of an accelerator's memory that is planned with; the rest goes to fragments."""
CPU_SHARE = 0.3
"""Share of a machine's memory that pages may take on a CPU, where other programs live, too."""
SPARE = 1.5
"""Pages beyond those that all sequences at full length need, for prefixes that are kept."""
MOST_SPARE = 4
"""An accelerator gives all it has, but no more than so many times that."""


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


def working_bytes(config: ModelConfig, tokens: int, total: int, dtype: Any) -> int:
    """Bytes that a forward needs on one device beside weights and pages, by what is large in it:
    the activations of one layer, the hidden states of all tokens, and the logits of the head.

    Args:
      tokens: that pass the layers at once.
      total: of a forward.
      dtype: of the activations.
    """
    size, hidden = jax.numpy.dtype(dtype).itemsize, config.hidden_size
    width = 2 * config.intermediate_size + 3 * config.num_attention_heads * config.head_dim
    layer = tokens * (width // shards("heads") + 4 * hidden) * size
    logits = 4 * 4 * LARGEST_HEAD * config.vocab_size // shards("vocab")
    return layer + (total + tokens) * hidden * size + logits


def plan_pages(
    config: ModelConfig,
    *,
    weights: int,
    working: int,
    page_size: int,
    pages_per_sequence: int,
    sequences: int,
    dtype: Any,
    platform: str,
    num_pages: int | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """Plans the pages of a replica: all that the device has left on an accelerator, and on a CPU
    what the sequences can use.

    Args:
      weights, working: bytes on a device that are taken.
      pages_per_sequence: pages of the longest sequence.
      sequences: N, that decode together.
      dtype: of keys and values.
      platform: of the devices.
      num_pages: asked for; None for as many as fit.
      limit: bytes of a device; by default what it says.

    Raises:
      InputError: not even one sequence of full length fits; with the numbers.
    """
    each = bytes_per_page(config, page_size, dtype)
    own_limit = device_memory() if limit is None else limit
    wanted = math.ceil(SPARE * sequences * pages_per_sequence) + 1
    if num_pages is None:
        num_pages = wanted
        if own_limit is not None:
            on_cpu = platform == "cpu"
            left = CPU_SHARE * own_limit if on_cpu else USABLE * own_limit - weights - working
            fitting = max(int(left // each), 0)
            num_pages = min(fitting, wanted if on_cpu else MOST_SPARE * wanted)
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
