"""Plans how many pages fit beside the weights and the largest compiled program."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax

from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.spans import LARGEST_HEAD
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import shards

GIB = 2**30
USABLE = 0.95
"""Share of an accelerator's memory that is planned for; the rest is lost to fragmentation."""
CPU_SHARE = 0.3
"""Share of a machine's memory that pages may take on a CPU, beside other programs."""
SPARE = 1.5
"""Pages in proportion to those that all sequences at full length need; the rest caches prefixes."""
CPU_TOKENS = 2048
"""Tokens for which each sequence has pages on a CPU, where the model's context is longer. Most
texts are shorter; where they are not, sequences wait for one another."""
MOST_SPARE = 4
"""The most pages on an accelerator, in proportion to those of `SPARE`."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of each device, in bytes.

    Attributes:
      weights: this device's share of the model.
      pages: this device's share of the keys and values.
      working: what the largest compiled program needs beside them.
      limit: the device's memory; None if it is not known.
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
    """Returns the bytes of a page of all layers on one device of the current mesh."""
    heads = max(config.num_key_value_heads // shards("heads"), 1)
    numbers = config.num_hidden_layers * page_size * 2 * heads
    size = jax.numpy.dtype(dtype).itemsize
    scale = 4 if jax.numpy.dtype(dtype) == jax.numpy.int8 else 0
    return numbers * (config.head_dim * size + scale)


def parameter_bytes(parameters: Any) -> int:
    """Returns the bytes of the parameters that one device holds."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(parameters)
    )


def working_bytes(config: ModelConfig, tokens: int, total: int, dtype: Any) -> int:
    """Estimates the bytes that a forward needs on one device beside weights and pages, from its
    large arrays: the activations of one layer, the hidden states of all tokens, and the head's
    logits.

    Args:
      tokens: that pass the layers at once.
      total: tokens of a forward.
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
    """Plans the pages of a replica: on an accelerator all the memory that is left; on a CPU, whose
    memory is others' too, as much as sequences of `CPU_TOKENS` use, and one of full length.

    Args:
      weights, working: bytes of a device that are taken.
      pages_per_sequence: pages of the longest sequence.
      sequences: N, that decode together.
      dtype: of keys and values.
      platform: of the devices.
      num_pages: as requested; None for as many as fit.
      limit: bytes of a device; by default what it reports.

    Raises:
      InputError: not even one sequence of full length fits; with the numbers.
    """
    each = bytes_per_page(config, page_size, dtype)
    own_limit = device_memory() if limit is None else limit
    on_cpu = platform == "cpu"
    usual = min(pages_per_sequence, math.ceil(CPU_TOKENS / page_size) if on_cpu else math.inf)
    wanted = max(math.ceil(SPARE * sequences * usual), pages_per_sequence) + 1
    if num_pages is None:
        num_pages = wanted
        if own_limit is not None:
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
    """Returns the memory of the first device in bytes: as it reports, or on a CPU the machine's."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
