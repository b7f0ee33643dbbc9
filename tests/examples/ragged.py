"""Random spans over random pages, and attention of them."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tests.reference.ragged import attend_span, cached
from wedlm_jax.attention.pages import Int8Rows, Spans, to_int8
from wedlm_jax.attention.ragged import attend_pages, token_places, write_pages
from wedlm_jax.attention.ragged_xla import make_tiles

LAYERS = 3
LAYER = 1
"""Which of them attends."""
BLOCK = 16
"""Places of a block: short sequences have several."""


@dataclasses.dataclass(frozen=True)
class Example:
    """Spans, and what the pages hold before them.

    Attributes:
      spans: of N sequences.
      pool: float32 ``[LAYERS * num_pages, page, 2 * K, head_dim]``.
      q, k, v: float32 ``[T, H or K, head_dim]``.
    """

    spans: Spans
    pool: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @property
    def num_pages(self):
        return self.pool.shape[0] // LAYERS

    def arguments(self, dtype=jnp.float32):
        """The same as device arrays, in the order of attention's arguments."""
        return self.spans, *(jnp.array(x, dtype) for x in (self.pool, self.q, self.k, self.v))

    def flat(self, sequence):
        """Which flat tokens are a sequence's."""
        starts = np.array(self.spans.query_starts)
        return slice(int(starts[sequence]), int(starts[sequence + 1]))


def make_spans(rng, lengths, before, *, page_size, columns=None, num_pages=None):
    """Returns spans after computed texts, on pages in random order, and the number of pages."""
    kv = [span + old if span else 0 for span, old in zip(lengths, before, strict=True)]
    needed = [-(-length // page_size) for length in kv]
    num_pages = num_pages or sum(needed) + 4
    free = list(rng.permutation(np.arange(1, num_pages)))
    table = np.zeros((len(kv), columns or max(1, *needed)), np.int32)
    for row, count in zip(table, needed, strict=True):
        row[:count] = [free.pop() for _ in range(count)]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    arrays = (starts, np.array(kv, np.int32), table)
    return Spans(*(jnp.array(x) for x in arrays)), num_pages


def make_example(
    seed, lengths, before, *, page_size=4, kv_heads=2, group=2, head_dim=8, padding=0, **sizes
):
    """Returns an example of spans; ``sizes`` are those of `make_spans`."""
    rng = np.random.default_rng(seed)
    spans, num_pages = make_spans(rng, lengths, before, page_size=page_size, **sizes)
    size = sum(lengths) + padding
    shapes = [
        (LAYERS * num_pages, page_size, 2 * kv_heads, head_dim),
        (size, kv_heads * group, head_dim),
        (size, kv_heads, head_dim),
        (size, kv_heads, head_dim),
    ]
    return Example(spans, *(rng.standard_normal(shape).astype(np.float32) for shape in shapes))


def run_xla(example, dtype=jnp.float32, **options):
    """What all tokens attend to ``[T, H, head_dim]`` in layer `LAYER`, and the pages behind it."""
    rounded = dtype == jnp.int8
    spans, pages, *tokens = example.arguments(jnp.float32 if rounded else dtype)
    pages = to_int8(pages) if rounded else pages
    return _write_and_attend(spans, pages, *tokens, example.num_pages, **options)


@partial(jax.jit, static_argnames=("num_pages", "deterministic", "tile", "together"))
def _write_and_attend(
    spans, pages, q, k, v, num_pages, *, deterministic=False, tile=6, together=False
):
    size, page_size = q.shape[0], pages.shape[1]
    places = token_places(spans, size, page_size)
    how = {"deterministic": deterministic, "together": together}
    plan = make_tiles(spans, size, page_size, tile=tile, block=BLOCK, **how)
    pages = write_pages(pages, k, v, places, LAYER, num_pages)
    return attend_pages(q, pages, plan, LAYER, num_pages), pages


def as_floats(pages):
    """The numbers that pages stand for, float32."""
    if isinstance(pages, Int8Rows):
        return np.array(pages.values, np.float32) * np.array(pages.scales)[..., None]
    return np.array(pages.astype(jnp.float32))


def assert_attended(example, out, pages, limit):
    """Compares every sequence with the reference, which reads the same pages."""
    out, pool = np.array(out.astype(jnp.float32)), as_floats(pages)
    dtype = jnp.float32 if isinstance(pages, Int8Rows) else pages.dtype
    q = np.array(jnp.array(example.q, dtype).astype(jnp.float32))
    tables = np.array(example.spans.page_table)
    for i, length in enumerate(np.array(example.spans.kv_lengths)):
        if length:
            keys, values = cached(pool, tables[i], length, LAYER, example.num_pages)
            expected = attend_span(q[example.flat(i)], keys, values, q.shape[-1] ** -0.5)
            np.testing.assert_allclose(out[example.flat(i)], expected, atol=limit, rtol=limit)
    assert np.isfinite(out).all()
