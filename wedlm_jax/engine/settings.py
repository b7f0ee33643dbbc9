"""The sizes and choices of an engine, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from wedlm_jax.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """What an engine is made for; see `wedlm_jax.engine.Engine` for what each means to a user.

    Attributes:
      replicas: R, of the mesh's ``data`` axis.
      sequences_each: N, sequences that a replica decodes together, at most.
      window: W, the widest window of the engine.
      max_text: tokens of a prompt and its completion together, at most.
      emitted: E, tokens that a sequence may commit in a burst.
      page_size: tokens of a page.
      num_pages: of a replica, the trash page included.
      max_pages: of one sequence.
      cache_dtype: of keys and values.
      chunk_tokens: tokens of prompts that a forward computes beside windows, at most.
      tokens_at_once: tokens that pass the layers at once, at most.
      attention: a name in `wedlm_jax.attention.RAGGED_BACKENDS`.
      refill: "streaming" or "blockwise".
      deterministic: whether every forward has the same shape.
      eos_token_ids: of the model.
    """

    replicas: int
    sequences_each: int
    window: int
    max_text: int
    emitted: int
    page_size: int
    num_pages: int
    max_pages: int
    cache_dtype: Any
    chunk_tokens: int
    tokens_at_once: int
    attention: str
    refill: str
    deterministic: bool
    eos_token_ids: tuple[int, ...]

    @property
    def sequences(self) -> int:
        """All sequences that decode together, over all replicas."""
        return self.replicas * self.sequences_each

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The tokens that end a completion."""
        ends = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*ends, *params.stop_token_ids)))
