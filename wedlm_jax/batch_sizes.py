"""The static shapes of a batch, and the lengths to which prompts are padded."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.buckets import bucket
from wedlm_jax.decode_state import num_slots
from wedlm_jax.row_params import NO_OPTIONS, OptionSizes
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.sharding import shards

if TYPE_CHECKING:
    from wedlm_jax.engine import Engine

SMALLEST_PROMPT_BUCKET = 32
SMALLEST_OUTPUT_BUCKET = 32
LONGEST_PIECE = 512
"""Tokens of a prompt that are prefilled at once, at most."""


def piece_bucket(tokens: int, start: int) -> int:
    """The length to which a piece of a prompt is padded, ``start`` tokens in."""
    if start == 0:
        return bucket(tokens, SMALLEST_PROMPT_BUCKET)
    # Behind a beginning each length is compiled for each live part of the cache: fewer lengths.
    size = SMALLEST_PROMPT_BUCKET
    while size < tokens:
        size = min(4 * size, LONGEST_PIECE)
    return size


def cache_bucket(size: int, smallest: int = 64) -> int:
    """The cache rows for ``size``: the next power of two times ``smallest``, or one and a half
    times one.

    A third of it stands idle at most; in return prompts of all lengths share few programs.
    """
    power = bucket(size, smallest)
    return power * 3 // 4 if power > smallest and size <= power * 3 // 4 else power


Tokens = Sequence[int] | np.ndarray
"""Token ids of a prompt."""


@dataclasses.dataclass(frozen=True)
class BatchSizes:
    """The static shapes of a batch.

    Attributes:
      rows: prompts that decode together.
      cache_size: rows of cache each has.
      max_output: completion tokens, at most.
      num_stops: stop tokens a row, at most.
      options: which others of `SamplingParams` a row may use; each changes the programs.
    """

    rows: int
    cache_size: int
    max_output: int
    num_stops: int
    options: OptionSizes = NO_OPTIONS

    @staticmethod
    def for_rows(
        engine: Engine,
        rows: Sequence[tuple[Tokens, SamplingParams]],
        *,
        count: int | None = None,
        cache_size: int | None = None,
    ) -> BatchSizes:
        """Sizes in which any of ``rows`` fits, ``count`` of them at once: by default all, and
        up to a power of two; with ``cache_size`` rows of cache each, by default just enough. On a
        mesh the rows are a multiple of its shards."""
        cuts = shards("batch")
        count = bucket(len(rows), 1) if count is None else count
        longest = max(cache_needed(engine, prompt, params) for prompt, params in rows)
        return BatchSizes(
            rows=-(-count // cuts) * cuts,
            cache_size=cache_bucket(longest) if cache_size is None else cache_size,
            max_output=bucket(max(p.max_tokens for _, p in rows), SMALLEST_OUTPUT_BUCKET),
            num_stops=bucket(max(len(stop_ids(engine, p)) for _, p in rows), 4),
            options=OptionSizes.of([p for _, p in rows]),
        )

    def holds(self, engine: Engine, prompt: Tokens, params: SamplingParams) -> bool:
        """Whether a row of this batch is large enough."""
        return (
            cache_needed(engine, prompt, params) <= self.cache_size
            and params.max_tokens <= self.max_output
            and len(stop_ids(engine, params)) <= self.num_stops
            and self.options.holds(params)
        )


def state_sizes(engine: Engine, sizes: BatchSizes) -> dict[str, Any]:
    """The arguments of `programs.allocate_state`."""
    return {
        "rows": sizes.rows,
        "window": engine.windows[-1],
        "max_output": sizes.max_output,
        "cache_size": sizes.cache_size,
        "num_logprobs": sizes.options.num_logprobs,
        "kv_cache_dtype": engine.kv_cache_dtype,
    }


def cache_needed(engine: Engine, prompt: Tokens, params: SamplingParams) -> int:
    """Cache rows of a prompt, whose last piece is padded, and its completion, with room for a
    whole window behind the last token; see `wedlm_jax.cache.write`."""
    return _room(len(prompt), params.max_tokens) + num_slots(engine.windows[-1])


def largest_cache(engine: Engine) -> int:
    """The cache rows of the longest prompt and completion that the model takes."""
    room = _room(engine.max_model_len - 1, 1)
    return cache_bucket(room + num_slots(engine.windows[-1]))


def smallest_cache(engine: Engine) -> int:
    """The cache rows below which no prompt has room."""
    return _room(1, 1) + num_slots(engine.windows[-1])


def _room(length: int, max_tokens: int) -> int:
    last = (length - 1) // LONGEST_PIECE * LONGEST_PIECE
    return max(last + piece_bucket(length - last, last), length + max_tokens)


def stop_ids(engine: Engine, params: SamplingParams) -> tuple[int, ...]:
    """The tokens that end a row."""
    own = () if params.ignore_eos else engine.config.eos_token_ids
    return (*own, *params.stop_token_ids)
