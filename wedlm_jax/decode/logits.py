"""The logits of a forward's rows, and what changes them before anything is chosen from them, the
entropy included.

In this order: bias, penalties, then the tokens that are forbidden get −inf. An option that no
sequence of a program has (None in `Options`) leaves no trace in it.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.bad_words import completing_tokens
from wedlm_jax.decode.head_rows import HeadRows
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.penalties import TokenUse, penalised
from wedlm_jax.decode.state import DecodeState
from wedlm_jax.model import Transformer
from wedlm_jax.params import NO_TOKEN
from wedlm_jax.sharding import constrain


def token_logits(model: Transformer, hidden: Array) -> Array:
    """Returns float32 logits ``[R, V]`` of hidden states ``[R, D]`` with the mask token's own at
    −inf: a mask is never emitted."""
    logits = constrain(model.logits(hidden), None, "vocab")
    mask = model.config.mask_token_id
    return logits if mask is None else logits.at[:, mask].set(-jnp.inf)


def adjusted_logits(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse | None
) -> Array:
    """Returns ``logits [R, V]`` as the options of the rows' sequences change them.

    Args:
      use: what the penalties count; None where no sequence has one.
    """
    if options.bias_ids is not None:
        assert options.bias is not None
        logits = logits.at[_at(logits, options.bias_ids[rows.sequence])].add(
            options.bias[rows.sequence], mode="drop"
        )
    if use is not None:
        logits = penalised(logits, state, options, rows, use)
    forbidden = []
    if options.min_tokens is not None:
        index = state.first_index[rows.sequence] + rows.slot
        early = index < options.min_tokens[rows.sequence]
        forbidden.append(jnp.where(early[:, None], options.stop_ids[rows.sequence], NO_TOKEN))
    if options.bad_words is not None:
        forbidden.append(completing_tokens(state, options, rows))
    if not forbidden:
        return logits
    ids = jnp.concatenate(forbidden, axis=-1)
    return logits.at[_at(logits, ids)].set(-jnp.inf, mode="drop")


def _at(logits: Array, ids: Array) -> tuple[Array, Array]:
    """Indices of the tokens ``ids [R, F]``. A negative one would count from the end: `NO_TOKEN`
    becomes one behind the end, where nothing is written."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return rows, jnp.where(ids == NO_TOKEN, logits.shape[1], ids)
