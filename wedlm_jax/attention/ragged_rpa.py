"""Ragged attention over pages on TPUs, in the kernel that JAX ships."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from wedlm_jax.attention.pages import Spans

KV_PAGES_PER_BLOCK = 4
QUERIES_PER_BLOCK = 32
VMEM_LIMIT = 64 * 2**20
"""Bytes."""


def attend_rpa(
    queries: Array, pages: Array, spans: Spans, layer: Array | int, num_pages: int, scale: float
) -> Array:
    """Causal attention of flat tokens over their sequences' pages; see `attend_pages`."""
    # Pallas takes a while to import, and only TPUs need it.
    from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention

    table = spans.page_table + layer * num_pages
    out: Any = ragged_paged_attention(
        queries,
        pages,
        spans.kv_lengths,
        table,
        spans.query_starts,
        jnp.full((1,), spans.num_sequences, jnp.int32),
        sm_scale=scale,
        num_kv_pages_per_block=min(KV_PAGES_PER_BLOCK, table.shape[1]),
        num_queries_per_block=min(QUERIES_PER_BLOCK, queries.shape[0]),
        vmem_limit_bytes=VMEM_LIMIT,
    )
    return out  # type: ignore[no-any-return]
