"""Repetition, presence and frequency penalties, and the counts of tokens that they need.

The counts take ``[B, V]``, so they exist only while a batch is decoded in which some row has a
penalty, and only inside the decode loop.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode_state import DecodeState
from wedlm_jax.sampling import NO_TOKEN, RowParams
from wedlm_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenUse:
    """Which tokens a row's text has.

    Attributes:
      prompt: bool ``[B, V]``, whether the prompt has it.
      committed: int32 ``[B, V]``, how often the committed completion has it.
    """

    prompt: Array
    committed: Array


def token_use(state: DecodeState, params: RowParams, vocab: int) -> TokenUse | None:
    """Counted afresh; None where no row has a penalty."""
    if params.prompt is None:
        return None
    none = constrain(jnp.zeros((state.output.shape[0], vocab), jnp.int32), "batch", "vocab")
    committed = jnp.arange(state.output.shape[1]) < state.num_output[:, None]
    return TokenUse(
        prompt=_counted(none, params.prompt, params.prompt != NO_TOKEN) > 0,
        committed=_counted(none, state.output, committed),
    )


def with_committed(
    use: TokenUse | None, before: DecodeState, after: DecodeState
) -> TokenUse | None:
    """The counts after a forward, from the states before and after it."""
    if use is None:
        return None
    # A window of P slots commits P tokens at most; an autoregressive row one behind its slot.
    place = before.num_output[:, None] + jnp.arange(before.tokens.shape[1] + 1)
    new = place < after.num_output[:, None]
    at = jnp.minimum(place, after.output.shape[1] - 1)
    tokens = jnp.take_along_axis(after.output, at, axis=1)
    return dataclasses.replace(use, committed=_counted(use.committed, tokens, new))


def penalised(logits: Array, state: DecodeState, params: RowParams, use: TokenUse) -> Array:
    """``logits [B, W, V]`` after the repetition penalty, then the other two.

    What counts as completion is committed or stands filled in the window, wherever. Rows
    without a penalty are not changed.
    """
    slot = jnp.arange(state.tokens.shape[1])
    # A known token stands in the output, or is the prompt's last.
    filled = state.filled & (slot < state.active[:, None]) & (slot >= state.known[:, None])
    counts = _counted(use.committed, state.tokens, filled)
    seen = (use.prompt | (counts > 0))[:, None]
    counts = counts.astype(logits.dtype)[:, None]

    def of_rows(values: Array | None) -> Array:
        assert values is not None
        return values[:, None, None]

    repetition = of_rows(params.repetition_penalty)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    return (
        logits
        - of_rows(params.frequency_penalty) * counts
        - of_rows(params.presence_penalty) * (counts > 0)
    )


def _counted(counts: Array, tokens: Array, valid: Array) -> Array:
    """``counts [B, V]`` and those of the ``tokens [B, N]`` that are ``valid``."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return counts.at[rows, jnp.where(valid, tokens, counts.shape[1])].add(1, mode="drop")
