"""Numbers that say how the engine is doing."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Counters:
    """Where the scheduler stands, over all replicas.

    Attributes:
      running, waiting: sequences.
      pages: those that sequences can have, all together.
      pages_free: of these, those that hold nothing.
      pages_cached: those that hold prefixes of finished sequences alone.
      pages_used: those of running sequences.
      places_computed: places in the used pages that hold final keys and values.
      places_spanned: places behind these that the next forwards write.
      prefix_tokens: tokens of texts that were in the cache when their sequence was admitted.
      prompt_tokens: tokens of prompts that had to be computed.
      recomputed_tokens: tokens that had to be computed again after a sequence was put back.
      preemptions: how often sequences were put back.
    """

    running: int
    waiting: int
    pages: int
    pages_free: int
    pages_cached: int
    pages_used: int
    places_computed: int
    places_spanned: int
    prefix_tokens: int
    prompt_tokens: int
    recomputed_tokens: int
    preemptions: int
