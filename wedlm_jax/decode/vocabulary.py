"""The token ids that may be chosen."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Says which token ids may be chosen; static.

    A model has a row for more ids than there are tokens: vocabularies are padded to a round number,
    Qwen3's from 151,669 to 151,936. Nothing keeps the logits of such rows low, and what is chosen
    from them ends as no text.

    Attributes:
      size: V, the rows of the model's output.
      end: no id from here on may be chosen.
      never: ids before that which may not be chosen either, ascending: the mask token, and holes in
        the tokenizer's numbering.
    """

    size: int
    end: int
    never: tuple[int, ...] = ()

    @staticmethod
    def of(config: ModelConfig, known: Collection[int] | None = None) -> Vocabulary:
        """Returns the vocabulary of a model.

        Args:
          known: the ids that its tokenizer knows; None without a tokenizer, where all ids but the
            mask token's may be chosen. The tokens that end a text always may.
        """
        size, mask = config.vocab_size, config.mask_token_id
        chosen = np.ones(size, bool)
        if known is not None:
            wanted = np.array([*known, *config.eos_token_ids], np.int64)
            chosen[:] = False
            chosen[wanted[wanted < size]] = True
        if mask is not None:
            chosen[mask] = False
        # Without a tokenizer the mask token is the only exception, wherever it stands.
        end = size if known is None else int(chosen.nonzero()[0].max(initial=-1)) + 1
        return Vocabulary(size, end, tuple(np.flatnonzero(~chosen[:end]).tolist()))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.end and token not in self.never

    def __len__(self) -> int:
        return self.end - len(self.never)

    def restricted(self, logits: Array) -> Array:
        """Returns ``logits [R, V]`` with −inf for what may not be chosen."""
        if self.never:
            ids = self.never[0] if len(self.never) == 1 else np.array(self.never)
            logits = logits.at[:, ids].set(-jnp.inf)
        if self.end == self.size:
            return logits
        # The compiler fuses this comparison with whatever reads the logits, on each part of a
        # sharded vocabulary.
        return jnp.where(jnp.arange(self.size) < self.end, logits, -jnp.inf)
