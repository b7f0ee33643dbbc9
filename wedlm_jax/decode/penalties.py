"""Repetition, presence and frequency penalties, and the counts of tokens that they need.

The counts of what is committed take ``[N, V]``. They are made when a burst begins, and updated
by what each forward commits; a row adds to them the tokens of its window that it sees.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.head_rows import HeadRows
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, is_filled
from wedlm_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenUse:
    """Which tokens the texts have.

    Attributes:
      prompt: bool ``[N, V]``, whether the prompt has it.
      committed: int32 ``[N, V]``, how often the committed completion has it.
    """

    prompt: Array
    committed: Array


def token_use(state: DecodeState, options: Options, vocab: int) -> TokenUse | None:
    """Counts the texts afresh; None where no sequence has a penalty."""
    if options.repetition_penalty is None:
        return None
    none = constrain(jnp.zeros((state.text.shape[0], vocab), jnp.int32), None, "vocab")
    place = jnp.arange(state.text.shape[1])
    in_prompt = place < state.prompt_length[:, None]
    committed = ~in_prompt & (place < state.text_length[:, None])
    return TokenUse(
        prompt=_counted(none, state.text, in_prompt) > 0,
        committed=_counted(none, state.text, committed),
    )


def with_committed(
    use: TokenUse | None, before: DecodeState, after: DecodeState
) -> TokenUse | None:
    """Returns the counts after a forward, from the states before and after it."""
    if use is None:
        return None
    # A window of P slots commits P tokens at most, and an anchored one the choice behind them.
    place = before.text_length[:, None] + jnp.arange(before.tokens.shape[1] + 1)
    new = place < after.text_length[:, None]
    at = jnp.minimum(place, after.text.shape[1] - 1)
    tokens = jnp.take_along_axis(after.text, at, axis=1)
    return dataclasses.replace(use, committed=_counted(use.committed, tokens, new))


def penalised(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse
) -> Array:
    """Returns ``logits [R, V]`` after the repetition penalty, then the other two.

    What counts as completion is committed or stands filled in the window where the row sees it.
    Sequences without a penalty are not changed.
    """
    counts = _counted(use.committed[rows.sequence], *seen_slots(state, rows))
    seen = use.prompt[rows.sequence] | (counts > 0)

    def of_rows(values: Array | None) -> Array:
        assert values is not None
        return values[rows.sequence][:, None]

    repetition = of_rows(options.repetition_penalty)
    scaled = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen, scaled, logits)
    return (
        logits
        - of_rows(options.frequency_penalty) * counts.astype(logits.dtype)
        - of_rows(options.presence_penalty) * (counts > 0)
    )


def seen_slots(state: DecodeState, rows: HeadRows) -> tuple[Array, Array]:
    """Returns the window slots' tokens, int32 ``[R, P]``, and which of them a row sees and are
    not in the text, bool ``[R, P]``.

    A mask sees all that is filled, wherever it stands. The row of a filled slot sees what stands
    before the slot that it predicts: in an anchored sequence that is what autoregressive
    decoding would see there.
    """
    slot = jnp.arange(state.tokens.shape[1])
    new = is_filled(state) & (slot >= state.known[:, None])
    before = rows.is_mask[:, None] | (slot < rows.slot[:, None])
    return state.tokens[rows.sequence], new[rows.sequence] & before


def _counted(counts: Array, tokens: Array, valid: Array) -> Array:
    """``counts [A, V]`` and those of the ``tokens [A, C]`` that are ``valid``."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return counts.at[rows, jnp.where(valid, tokens, counts.shape[1])].add(1, mode="drop")
