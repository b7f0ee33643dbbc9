"""Ragged attention over pages on TPUs, by the kernel that JAX ships.

The kernel reads each sequence's first block of pages while it computes the sequence before. A
sequence without tokens never waits for that read, so the next one would compute with the wrong
block, and at the end a semaphore would stay set for the next kernel. Therefore the spans that have
tokens come first, and the kernel is told how many there are. Neither their order nor that of the
flat tokens changes, so only the small table of pages moves, once per forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.pages import Spans

KV_PAGES_PER_BLOCK = 4
QUERIES_PER_BLOCK = 32
VMEM_LIMIT = 64 * 2**20
"""The vector memory that the kernel may use, in bytes."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LiveSpans:
    """The spans of a forward, those with tokens first.

    Attributes:
      spans: spans of N sequences, of which only the first ``count`` have tokens.
      count: int32 ``[1]``, how many have tokens.
    """

    spans: Spans
    count: Array


def live_first(spans: Spans) -> LiveSpans:
    """Moves the spans without tokens to the end; the order of the others stays::

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


def attend_tpu(
    queries: Array, pages: Array, live: LiveSpans, layer: Array | int, num_pages: int, scale: float
) -> Array:
    """Computes `wedlm_jax.attention.ragged.attend_pages` with JAX's kernel.

    Args:
      queries: ``[T, H, head_dim]``.
      pages: the pool of one replica.
      live: from `live_first`; at least one span has tokens.
      layer: its number, from 0.
      num_pages: number of pages per layer.
      scale: scale of the scores.

    Returns:
      ``[T, H, head_dim]``; zeros for padding. There the kernel leaves its memory uninitialised,
      which may be NaN, and the next layer would write that into the trash page.
    """
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
        sm_scale=scale,
        num_kv_pages_per_block=min(KV_PAGES_PER_BLOCK, table.shape[1]),
        num_queries_per_block=min(QUERIES_PER_BLOCK, queries.shape[0]),
        vmem_limit_bytes=VMEM_LIMIT,
    )
    real = jnp.arange(queries.shape[0]) < spans.query_starts[-1]
    return jnp.where(real[:, None, None], out, 0)
