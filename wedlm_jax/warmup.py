"""Every program that a batch can need, compiled before the first prompt comes.

A server or a timed run then never waits for the compiler: while its batches have the sizes that
were compiled, `Engine.num_programs` does not move. A batch of other sizes, as the one row of
`LLM.stream` is, compiles programs of its own. With compiled programs kept on disk
(`wedlm_jax.compiled_cache`) the next start is quick too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import numpy as np

from wedlm_jax.batch import SMALLEST_LIVE, Batch
from wedlm_jax.batch_sizes import LONGEST_PIECE, BatchSizes, cache_bucket, piece_bucket
from wedlm_jax.buckets import bucket
from wedlm_jax.engine import Engine
from wedlm_jax.sampling import SamplingParams


def warm_up(
    engine: Engine,
    sizes: Sequence[BatchSizes],
    on_step: Callable[[int, int], None] | None = None,
) -> None:
    """Compiles all that batches of these sizes can need, by running it on one of each.

    Args:
      on_step: told after each step how many are done, of how many that are known.
    """
    done = total = 0

    def warm(batch: Batch) -> None:
        nonlocal done, total
        steps = [*_prefills(batch), *_loops(batch), *_rest(batch)]
        total += len(steps)
        for step in steps:
            step()
            done += 1
            if on_step is not None:
                on_step(done, total)
        jax.block_until_ready(batch.look().done)

    for each in sizes:
        warm(engine.open(each))


Step = Callable[[], object]


def _prefills(batch: Batch) -> Iterator[Step]:
    """Pieces of every padded length, first ones and later ones, one row and many."""
    size = batch.sizes.cache_size
    for start in (0, *_lives(size)):
        lengths = {piece_bucket(tokens, start) for tokens in range(1, LONGEST_PIECE + 1)}
        for length in sorted(lengths):
            at = min(start, size - length)
            if at < 0 or (start and at < 1):
                continue
            tokens = np.zeros(length, np.int32)
            for rows in (range(batch.sizes.rows), range(1)):
                yield partial(batch.prefill, [(row, at, tokens) for row in rows])


def _loops(batch: Batch) -> Iterator[Step]:
    """The decode loop at every width and every length of the cache."""

    def loop(window: int | None, live: int) -> None:
        if window is not None:
            batch.set_windows(window)
        batch.dispatch(0, live=live)

    widths: Sequence[int | None] = batch.windows if batch.chooses_width else [None]
    for live in _loop_lives(batch.sizes.cache_size):
        for window in widths:
            yield partial(loop, window, live)


def _rest(batch: Batch) -> Iterator[Step]:
    rows = list(range(batch.sizes.rows))
    yield partial(batch.copy_prefix, rows, rows, [1] * len(rows))
    yield partial(batch.copy_prefix, [0], [0], [1])
    yield partial(batch.open, [0], [np.ones(1, np.int32)], [SamplingParams(max_tokens=1)])
    yield partial(batch.finish, 0)

    def gather(count: int) -> None:
        batch.gather(rows[:count], batch.look())

    for count in sorted({bucket(n, 1) for n in range(1, len(rows) + 1)}):
        yield partial(gather, count)


def _lives(size: int) -> list[int]:
    """The parts of the cache that a piece of a prompt may see before itself."""
    return sorted({min(bucket(n, SMALLEST_LIVE), size) for n in range(1, size + 1)})


def _loop_lives(size: int) -> list[int]:
    """The parts of the cache that the decode loop may read."""
    return sorted({min(cache_bucket(n, SMALLEST_LIVE), size) for n in range(1, size + 1)})
