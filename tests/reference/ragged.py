"""Attention of spans over pages, a query and a head at a time."""

import numpy as np


def cached(pool, table, length, layer, num_pages):
    """Keys and values ``[length, K, head_dim]`` of one sequence, in order.

    Args:
      pool: ``[layers * num_pages, page, 2 * K, head_dim]``.
      table: int ``[max_pages]``.
    """
    page_size = pool.shape[1]
    rows = [pool[layer * num_pages + table[i // page_size], i % page_size] for i in range(length)]
    both = np.array(rows).reshape(length, *pool.shape[2:])
    return both[:, 0::2], both[:, 1::2]


def attend_span(queries, keys, values, scale):
    """The last tokens of a sequence ``queries [S, H, head_dim]`` over all of its keys and values
    ``[length, K, head_dim]``, causally; in float64."""
    queries, keys, values = (x.astype(np.float64) for x in (queries, keys, values))
    span, heads, _ = queries.shape
    group = heads // keys.shape[1]
    out = np.zeros_like(queries)
    for i in range(span):
        seen = len(keys) - span + i + 1
        for head in range(heads):
            scores = keys[:seen, head // group] @ queries[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ values[:seen, head // group]
    return out
