"""What changes a row's logits before anything is chosen from them, the entropy included.

In this order: bias, penalties, then the tokens that are forbidden get −inf. An option that no
row of a batch has (None in `RowParams`) leaves no trace in the compiled program.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.bad_words import completing_tokens, text_around
from wedlm_jax.decode_state import DecodeState, first_index
from wedlm_jax.penalties import TokenUse, penalised
from wedlm_jax.sampling import NO_TOKEN, RowParams
from wedlm_jax.sharding import constrain


def adjusted_logits(
    logits: Array, state: DecodeState, params: RowParams, slots: Array, use: TokenUse | None
) -> Array:
    """``logits [B, W, V]`` as the rows' options change them.

    Args:
      slots: int32 ``[B, W]``, the slot whose token each of them predicts.
      use: what the penalties count; None where no row has one.
    """
    if params.bias_ids is not None:
        assert params.bias is not None
        logits = logits + _dense_bias(params.bias_ids, params.bias, logits.shape[-1])[:, None]
    if use is not None:
        logits = penalised(logits, state, params, use)
    forbidden = []
    if params.min_tokens is not None:
        early = first_index(state)[:, None] + slots < params.min_tokens[:, None]
        forbidden.append(jnp.where(early[..., None], params.stop_ids[:, None], NO_TOKEN))
    if params.bad_words is not None:
        text = text_around(state, params.bad_words)
        forbidden.append(completing_tokens(text, params.bad_words, slots))
    return _without(logits, jnp.concatenate(forbidden, axis=-1)) if forbidden else logits


def _dense_bias(ids: Array, bias: Array, vocab: int) -> Array:
    """``bias [B, N]`` of tokens ``ids [B, N]`` as float32 ``[B, V]``."""
    rows = jnp.arange(ids.shape[0])[:, None]
    dense = constrain(jnp.zeros((ids.shape[0], vocab)), "batch", "vocab")
    return dense.at[rows, jnp.where(ids == NO_TOKEN, vocab, ids)].add(bias, mode="drop")


def _without(logits: Array, forbidden: Array) -> Array:
    """``logits [B, W, V]`` with −inf at the tokens ``forbidden [B, W, F]``."""
    rows = jnp.arange(logits.shape[0])[:, None, None]
    places = jnp.arange(logits.shape[1])[:, None]
    # A negative index would count from the end; behind the end nothing is written.
    ids = jnp.where(forbidden < 0, logits.shape[-1], forbidden)
    return logits.at[rows, places, ids].set(-jnp.inf, mode="drop")
