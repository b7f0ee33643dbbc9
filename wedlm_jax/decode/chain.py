"""Drafts that follow one another: the masks of a window, corrected from left to right.

Masks are computed together and so do not see each other's drafts. A drafter with a previous-token
head (`wedlm_jax.model.previous_token`) knows what the draft before a mask says about the mask's
own. That takes one step for each mask, so it is done for the likeliest tokens alone: a step then
reads C rows of the output projection per sequence instead of all V.

Drafts never change the text (`wedlm_jax.decode.verified`), so what this misses costs speed alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.options import Options
from wedlm_jax.decode.sampling import choose_candidates
from wedlm_jax.decode.spans import SpanPlan
from wedlm_jax.decode.state import DecodeState, HeadRows, is_mask
from wedlm_jax.model import Transformer

CANDIDATES = 32
"""C, the tokens of a mask that a draft is chosen from."""


class Candidates(NamedTuple):
    """The likeliest tokens of rows, ``[..., C]``.

    Attributes:
      tokens: int32.
      logprobs: float32, their log-probabilities; −inf for tokens that may not be chosen.
    """

    tokens: Array
    logprobs: Array


def likeliest(logits: Array) -> Candidates:
    """Returns the candidates of ``logits [R, V]``."""
    values, tokens = jax.lax.top_k(logits, min(CANDIDATES, logits.shape[-1]))
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Candidates(tokens.astype(jnp.int32), values - total)


def chained_drafts(
    model: Transformer,
    state: DecodeState,
    hidden: Array,
    plan: SpanPlan,
    options: Options,
    tokens: Array,
    entropies: Array,
    candidates: Candidates,
) -> tuple[Array, Array]:
    """Chooses the drafts of masks anew, from left to right, each with the token before it known.

    Args:
      model: a model with a previous-token head.
      hidden: ``[T, D]``, the forward's final hidden states.
      tokens, entropies: ``[N, P+1]``, what was predicted for each slot on its own.
      candidates: ``[N, P+1, C]``.

    Returns:
      tokens and entropies with those of the masks behind each window's first mask replaced.
    """
    sequences, slots = state.filled.shape
    masked = is_mask(state)
    # The first mask's token is chosen by the row of text before it. A window of W has W - 1 others.
    first = jnp.where(masked.any(axis=1), masked.argmax(axis=1), slots).astype(jnp.int32)
    sequence = jnp.arange(sequences)

    def step(before: Array, offset: Array) -> tuple[Array, tuple[Array, Array]]:
        slot = jnp.minimum(first + offset, slots - 1)
        at = plan.starts[:-1] + plan.chunk + plan.place[sequence, slot]
        there = hidden[jnp.minimum(at, hidden.shape[0] - 1)]
        own = Candidates(*(x[sequence, slot] for x in candidates))
        logits = own.logprobs + model.logit_corrections(there, before, own.tokens)
        rows = HeadRows(sequence, slot, masked[sequence, slot], jnp.ones(sequences, bool))
        token = choose_candidates(logits, own.tokens, state, options, rows)
        return token, (token, _entropy(logits, own.logprobs))

    offsets = jnp.arange(1, slots // 2, dtype=jnp.int32)
    known = tokens[sequence, jnp.minimum(first, slots)]
    _, chosen = jax.lax.scan(step, known, offsets)
    place = first[:, None] + offsets
    is_drafted = (place < state.active[:, None]) & plan.window[:, None]
    place = jnp.where(is_drafted, place, slots + 1)
    return tuple(
        old.at[sequence[:, None], place].set(new.T, mode="drop")
        for old, new in zip((tokens, entropies), chosen, strict=True)
    )


def _entropy(logits: Array, before: Array) -> Array:
    """Returns the entropy in nats ``[N]`` of candidates' corrected ``logits [N, C]``; the tokens
    that are no candidates count as one, whose logit is not corrected."""
    others = jnp.log1p(-jnp.minimum(jnp.exp(before).sum(axis=-1, keepdims=True), 1.0 - 1e-6))
    log_p = jax.nn.log_softmax(jnp.concatenate([logits, others], axis=-1))
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0.0).sum(axis=-1)
