"""Which masks to fill, and with what: entropies, the fill rule, token sampling."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.params import MOST_LOGPROBS as MOST_LOGPROBS
from wedlm_jax.params import NO_TOKEN as NO_TOKEN
from wedlm_jax.params import SamplingParams as SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """`SamplingParams` of a batch as arrays ``[B]``, and each row's window.

    ``entropy_threshold`` is −inf for None: then no entropy lies below it. ``stop_ids`` is
    int32 ``[B, N]``, filled up with `NO_TOKEN`.

    What stands behind it is None where no row of the batch has the option, and then the
    compiled program knows nothing of it. ``bias_ids`` and ``bias`` are ``[B, N]``,
    ``bad_words`` is ``[B, N, L]``; ``prompt [B, S]`` is there where penalties are. All are
    filled up with `NO_TOKEN`. ``verified`` is bool ``[B]``, ``draft_budget``
    stands beside it.
    """

    window: Array
    temperature: Array
    top_p: Array
    top_k: Array
    max_tokens: Array
    entropy_threshold: Array
    position_penalty: Array
    seed: Array
    stop_ids: Array
    verified: Array | None = None
    draft_budget: Array | None = None
    min_tokens: Array | None = None
    bias_ids: Array | None = None
    bias: Array | None = None
    bad_words: Array | None = None
    repetition_penalty: Array | None = None
    presence_penalty: Array | None = None
    frequency_penalty: Array | None = None
    prompt: Array | None = None

    @property
    def anchored(self) -> Array:
        """bool ``[B]``: rows whose every token is the autoregressive one, chosen behind all tokens
        before it. Their window begins with the last token of the text."""
        return (self.window == 0) if self.verified is None else (self.window == 0) | self.verified


def entropy(logits: Array) -> Array:
    """Shannon entropy in nats, float32 ``[...]``, of the softmax of ``logits [..., V]``.

    A logit of −inf has probability 0 and adds nothing.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    energy = jnp.where(weights > 0, weights * shifted, 0.0).sum(axis=-1)
    return jnp.log(total) - energy / total


def fill_rule(
    entropies: Array, slots: Array, is_mask: Array, threshold: Array, penalty: Array
) -> Array:
    """The masks to fill in this forward (WeDLM section 5).

    Args:
      entropies: float32 ``[B, W]``.
      slots: int32 ``[B, W]``, each candidate's logical slot; the first is the first mask.
      is_mask: bool ``[B, W]``, False where a candidate is not there.
      threshold, penalty: τ and λ, ``[B]``.

    Returns:
      bool ``[B, W]``: every mask with H + λ·distance < τ, or the single smallest.
    """
    distance = (slots - slots[:, :1]).astype(jnp.float32)
    adjusted = jnp.where(is_mask, entropies + penalty[:, None] * distance, jnp.inf)
    below = adjusted < threshold[:, None]
    single = jnp.arange(slots.shape[1]) == jnp.argmin(adjusted, axis=-1)[:, None]
    return jnp.where(below.any(axis=-1, keepdims=True), below, single & is_mask)


def choose_tokens(logits: Array, slots: Array, forwards: Array, params: RowParams) -> Array:
    """The token each position would be filled with: int32 ``[B, W]``.

    Args:
      logits: float32 ``[B, W, V]``.
      slots, forwards: int32 ``[B, W]``; with the row's seed they name the random stream of
        each, so a row draws the same numbers in any batch.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample() -> Array:
        def draw(kept: Array, row_slots: Array, row_forwards: Array, seed: Array) -> Array:
            by_forward = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(row_forwards)
            keys = jax.vmap(jax.random.fold_in)(by_forward, row_slots)
            return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)

        kept = logits / jnp.maximum(params.temperature, 1e-6)[:, None, None]
        # Sorting the vocabulary costs more than all else here: only where a row asks for it.
        kept = jax.lax.cond(
            ((params.top_k > 0) | (params.top_p < 1)).any(),
            lambda kept: jax.vmap(truncate)(kept, params.top_k, params.top_p),
            lambda kept: kept,
            kept,
        )
        drawn = jax.vmap(draw)(kept, slots, forwards, params.seed)
        return jnp.where(params.temperature[:, None] > 0, drawn, greedy)

    return jax.lax.cond((params.temperature > 0).any(), sample, lambda: greedy)


def truncate(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Sets to −inf what top-k, then top-p of the rest, leave out.

    Args:
      logits: ``[..., V]``, already divided by the temperature.
      top_k: scalar, 0 for all. Exactly so many stay; of equal logits the lower ids.
      top_p: scalar in (0, 1].
    """
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    ranked = jnp.where(jnp.arange(vocab) < k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    # What stands before a token must not yet reach top_p; the first always stays.
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where((before < top_p) | (jnp.arange(vocab) == 0), ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
