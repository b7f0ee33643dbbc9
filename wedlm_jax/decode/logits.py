"""The logits of a forward's rows, and the sampling options that change them before a token is
chosen or an entropy taken.

In this order: bias, penalties, then −inf for forbidden tokens and for those outside a grammar. A
program whose sequences do not use an option (None in `Options`) contains no code for it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.allowed_tokens import allowed_tokens
from wedlm_jax.decode.bad_words import forbidden, logit_places, without_completing_tokens
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, HeadRows, is_filled
from wedlm_jax.decode.vocabulary import Vocabulary
from wedlm_jax.model import Transformer
from wedlm_jax.params import NO_TOKEN
from wedlm_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenUse:
    """The token counts that penalties need.

    Counted when a burst starts, and updated with what each forward commits; a row adds to them the
    window's tokens that it sees.

    Attributes:
      prompt: bool ``[N, V]``, whether the prompt has it.
      committed: int32 ``[N, V]``, how often the committed completion has it.
    """

    prompt: Array
    committed: Array


def token_logits(model: Transformer, hidden: Array, vocabulary: Vocabulary) -> Array:
    """Returns float32 logits ``[R, V]`` of hidden states ``[R, D]``, −inf for what may not be
    chosen: so a mask is never filled with itself."""
    return vocabulary.restricted(constrain(model.logits(hidden), None, "vocab"))


def adjusted_logits(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse | None
) -> Array:
    """Applies the options of the rows' sequences to ``logits [R, V]``.

    Args:
      use: the counts that penalties need; None where no sequence has a penalty.
    """
    if options.bias_ids is not None:
        assert options.bias is not None
        logits = logits.at[logit_places(logits, options.bias_ids[rows.sequence])].add(
            options.bias[rows.sequence], mode="drop"
        )
    if use is not None:
        logits = penalised(logits, state, options, rows, use)
    if options.min_tokens is not None:
        index = state.first_index[rows.sequence] + rows.slot
        early = index < options.min_tokens[rows.sequence]
        stops = jnp.where(early[:, None], options.stop_ids[rows.sequence], NO_TOKEN)
        logits = forbidden(logits, stops)
    if options.bad_words is not None:
        logits = without_completing_tokens(logits, state, options, rows)
    if options.allowed is not None:
        logits = jnp.where(allowed_tokens(options.allowed, rows, logits.shape[1]), logits, -jnp.inf)
    return logits


# --- penalties -----------------------------------------------------------------------------


def token_use(state: DecodeState, options: Options, vocab: int) -> TokenUse | None:
    """Counts the tokens of the texts; returns None where no sequence has a penalty."""
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
    # A window of P slots commits at most P tokens, an anchored one also the choice after them.
    place = before.text_length[:, None] + jnp.arange(before.tokens.shape[1] + 1)
    new = place < after.text_length[:, None]
    at = jnp.minimum(place, after.text.shape[1] - 1)
    tokens = jnp.take_along_axis(after.text, at, axis=1)
    return dataclasses.replace(use, committed=_counted(use.committed, tokens, new))


def penalised(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse
) -> Array:
    """Applies the repetition penalty, then the other two, to ``logits [R, V]``.

    Committed tokens count, and those filled in the window where the row sees them. Logits of
    sequences without a penalty are not changed.
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
    """Returns the window's tokens, int32 ``[R, P]``, and which of them a row sees beside the text,
    bool ``[R, P]``.

    A mask sees every filled slot, on either side: they are physically before it. The row of a
    filled slot sees the slots before the one that it predicts, which in an anchored sequence is
    what autoregressive decoding would see there.
    """
    slot = jnp.arange(state.tokens.shape[1])
    new = is_filled(state) & (slot >= state.known[:, None])
    before = rows.is_mask[:, None] | (slot < rows.slot[:, None])
    return state.tokens[rows.sequence], new[rows.sequence] & before


def _counted(counts: Array, tokens: Array, valid: Array) -> Array:
    """Adds the ``tokens [A, C]`` that are ``valid`` to ``counts [A, V]``."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return counts.at[rows, jnp.where(valid, tokens, counts.shape[1])].add(1, mode="drop")
