"""Attention of spans over pages: one dispatch, three backends.

A span is a prompt chunk, an autoregressive token or a window. It follows what its sequence has
computed, and is causal in physical order. Keys and values are written first, so that tokens attend
to themselves through the pages, with the rounding of the cache.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from wedlm_jax.attention.pages import (
    HEADS,
    Pages,
    Spans,
    allocate_pages,
    on_own_heads,
    pool_spec,
    token_places,
    write_pages,
)
from wedlm_jax.attention.ragged_xla import Tiles, attend_xla, make_tiles
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError

__all__ = [
    "RAGGED_BACKENDS",
    "Pages",
    "Plan",
    "Spans",
    "allocate_pages",
    "attend_pages",
    "attention_plan",
    "check_ragged_backend",
    "token_places",
    "write_pages",
]

RAGGED_BACKENDS = {
    "xla": "plain XLA, for any device: the reference",
    "gather": "plain XLA in few large products, for GPUs",
    "rpa": "a kernel for TPUs that comes with JAX",
}
"""The backends by name, and what each is for."""

KV_PAGES_PER_BLOCK = 4
QUERIES_PER_BLOCK = 32
VMEM_LIMIT = 64 * 2**20
"""The vector memory that the kernel may use, in bytes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LiveSpans:
    """The spans of a forward, of which only the first ``count`` (int32 ``[1]``) have tokens."""

    spans: Spans
    count: Array


def live_first(spans: Spans) -> LiveSpans:
    """Moves the spans without tokens to the end; the others keep their order.

    The kernel reads each sequence's first block of pages while it computes the sequence before. A
    sequence without tokens never waits for that read, so the next one would compute with the wrong
    block, and at the end a semaphore would stay set for the next kernel. Neither the order of the
    others nor that of the flat tokens changes, so only the small table of pages moves, once per
    forward::

    tokens of each span    0 3 0 17 1        3 17 1 0 0
    query_starts         0 0 3 3 20 21     0 3 20 21 21 21
    count                                  3
    """
    lengths = spans.query_starts[1:] - spans.query_starts[:-1]
    order = jnp.argsort(lengths == 0, stable=True)
    starts = jnp.cumsum(lengths[order], dtype=jnp.int32)
    moved = Spans(
        jnp.concatenate([jnp.zeros(1, jnp.int32), starts]),
        spans.kv_lengths[order],
        spans.page_table[order],
    )
    return LiveSpans(moved, (lengths > 0).sum(keepdims=True, dtype=jnp.int32))


Plan = Tiles | LiveSpans
"""What a forward computes once for all layers; the type depends on the backend."""


def check_ragged_backend(
    name: str | None, platform: str, config: ModelConfig, *, int8: bool = False
) -> str:
    """Returns the backend to use, and refuses one that cannot run.

    Args:
      name: a name in `RAGGED_BACKENDS`; None for the platform's default.
      platform: JAX's name of the devices' platform.
      int8: whether the pages hold 8-bit integers.

    Raises:
      InputError: an unknown name, or a kernel that does not fit devices, heads or pages.
    """
    fits = config.head_dim % 128 == 0 and not int8
    if name is None:
        defaults = {"cpu": "xla", "tpu": "rpa" if fits else "xla"}
        return defaults.get(platform, "gather")
    if name not in RAGGED_BACKENDS:
        names = ", ".join(RAGGED_BACKENDS)
        raise InputError(f"attention: expected one of {names}, not {name!r}")
    if name == "rpa":
        if platform != "tpu":
            raise InputError(f"attention 'rpa' is for TPUs, not for {platform!r}: use 'xla'")
        if int8:
            raise InputError("attention 'rpa' cannot read an int8 cache: use 'xla'")
        if not fits:
            raise InputError(
                f"attention 'rpa' needs a head_dim that is a multiple of 128, not {config.head_dim}"
            )
    return name


def attention_plan(
    spans: Spans,
    num_tokens: int,
    page_size: int,
    *,
    implementation: str,
    deterministic: bool = False,
) -> Plan:
    """Computes what the attention of T flat tokens needs once for all layers.

    Args:
      num_tokens: T.
      implementation: a name in `RAGGED_BACKENDS`.
      deterministic: compute all spans in the same way, so that a token's result is bit-identical
        however its sequence is divided into spans.
    """
    if implementation not in RAGGED_BACKENDS:
        raise ValueError(f"attention {implementation!r}: not in {list(RAGGED_BACKENDS)}")
    if implementation == "rpa":
        return live_first(spans)
    together = implementation == "gather"
    return make_tiles(spans, num_tokens, page_size, deterministic=deterministic, together=together)


def attend_pages(
    queries: Array, pages: Pages, plan: Plan, layer: Array | int, num_pages: int
) -> Array:
    """Computes causal softmax attention of flat tokens over the pages of their sequences.

    A token that is j tokens before the end of the span of sequence i sees the places before
    ``kv_lengths[i] - j``. Scores, softmax and sums are float32.

    Args:
      queries: ``[T, H, head_dim]``; heads ``k * G`` to ``k * G + G - 1`` read KV head k.
      pages: the pool of one replica, which must already hold these tokens.
      plan: from `attention_plan`; it determines the backend.
      layer: its number, from 0.
      num_pages: number of pages per layer.

    Returns:
      ``[T, H, head_dim]`` in the dtype of ``queries``; arbitrary finite numbers for padding.
    """

    def local(queries: Array, pages: Pages, plan: Plan, layer: Array) -> Array:
        if isinstance(plan, Tiles):
            return attend_xla(queries, pages, plan, layer, num_pages)
        return _attend_tpu(queries, pages, plan, layer, num_pages)

    whole = PartitionSpec()
    run = on_own_heads(local, [HEADS, pool_spec(pages), whole, whole], HEADS)
    return run(queries, pages, plan, layer)  # type: ignore[no-any-return]


def _attend_tpu(
    queries: Array, pages: Any, live: LiveSpans, layer: Array | int, num_pages: int
) -> Array:
    """Computes `attend_pages` with JAX's kernel; at least one span has tokens."""
    # Pallas takes a while to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    spans = live.spans
    table = spans.page_table + layer * num_pages
    out: Any = ragged_paged_attention(
        queries,
        pages,
        spans.kv_lengths,
        table,
        spans.query_starts,
        live.count,
        sm_scale=queries.shape[-1] ** -0.5,
        num_kv_pages_per_block=min(KV_PAGES_PER_BLOCK, table.shape[1]),
        num_queries_per_block=min(QUERIES_PER_BLOCK, queries.shape[0]),
        vmem_limit_bytes=VMEM_LIMIT,
    )
    # For padding the kernel leaves its memory uninitialised, which may be NaN, and the next layer
    # would write that into the trash page.
    real = jnp.arange(queries.shape[0]) < spans.query_starts[-1]
    return jnp.where(real[:, None, None], out, 0)
