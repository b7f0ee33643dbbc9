"""The logits of a forward's rows, and the sampling options that change them before a token is
chosen or an entropy computed.

They apply in this order: bias, penalties, then −inf for forbidden tokens and for those outside a
grammar. A program whose sequences do not use an option (None in `Options`) contains no code for it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.options import Options, Vocabulary, allowed_tokens
from wedlm_jax.decode.state import DecodeState, HeadRows, is_filled
from wedlm_jax.model import Transformer
from wedlm_jax.params import NO_TOKEN
from wedlm_jax.sharding import constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TokenUse:
    """The token counts that penalties need.

    They are counted when a burst starts and updated with what each forward commits; each row adds
    the window's tokens that it sees.

    Attributes:
      prompt: bool ``[N, V]``, whether the prompt contains each token.
      committed: int32 ``[N, V]``, how often the committed completion contains it.
    """

    prompt: Array
    committed: Array


def token_logits(model: Transformer, hidden: Array, vocabulary: Vocabulary) -> Array:
    """Returns float32 logits ``[R, V]`` of hidden states ``[R, D]``, −inf for tokens that may not
    be chosen. One of these is the mask token, so a mask is never filled with itself."""
    return vocabulary.restricted(constrain(model.logits(hidden), None, "vocab"))


def adjusted_logits(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse | None
) -> Array:
    """Applies the options of the rows' sequences to ``logits [R, V]``. ``use`` is None where no
    sequence has a penalty."""
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
        prompt=_add_counts(none, state.text, in_prompt) > 0,
        committed=_add_counts(none, state.text, committed),
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
    return dataclasses.replace(use, committed=_add_counts(use.committed, tokens, new))


def penalised(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows, use: TokenUse
) -> Array:
    """Applies the repetition penalty, then the other two, to ``logits [R, V]``.

    Committed tokens count, and so do filled slots of the window that the row sees. Logits of
    sequences without a penalty are unchanged.
    """
    counts = _add_counts(use.committed[rows.sequence], *seen_slots(state, rows))
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
    """Returns the window's tokens, int32 ``[R, P]``, and which of them each row sees in addition to
    the text, bool ``[R, P]``.

    A mask sees every filled slot on either side, since all are physically before it. The row of a
    filled slot sees the slots before the one that it predicts; in an anchored sequence this is what
    autoregressive decoding would see there.
    """
    slot = jnp.arange(state.tokens.shape[1])
    new = is_filled(state) & (slot >= state.known[:, None])
    before = slot < rows.sees[:, None]
    return state.tokens[rows.sequence], new[rows.sequence] & before


def _add_counts(counts: Array, tokens: Array, valid: Array) -> Array:
    """Adds the ``tokens [A, C]`` that are ``valid`` to ``counts [A, V]``."""
    rows = jnp.arange(tokens.shape[0])[:, None]
    return counts.at[rows, jnp.where(valid, tokens, counts.shape[1])].add(1, mode="drop")


# --- Words that may not be written -----------------------------------------------------------
#
# This keeps token sequences ("bad words") out of completions, although masks are filled out of
# order.
#
# A program with bad words has room for the maximum number of them per sequence. A forward in which
# no sequence has any computes nothing for them.
#
# A word can be completed at any of its places, so a token is forbidden wherever it would complete
# a word together with the tokens that the row sees, before and after its place. Masks filled in the
# same forward do not see one another: if they complete a word together, the last of them stays
# masked, and the next forward chooses again. The first mask that a forward fills is never the last
# of several, so each forward still fills at least one.
#
# The row of a filled slot sees nothing after the place that it predicts. So in anchored sequences
# a token is forbidden exactly where autoregressive decoding forbids it.
#
# Only the completion counts: a word that starts in the prompt is allowed.

UNKNOWN = -2
"""Marks places that are masked or not part of the completion; `NO_TOKEN` pads short words."""


def text_around(state: DecodeState, margin: int) -> Array:
    """Returns the completion around each window, int32 ``[N, E]``, `UNKNOWN` where there is no
    token.

    Slot s is entry ``margin + s``. After the last slot come the one that its row predicts, and
    ``margin`` more entries.
    """
    slots = state.tokens.shape[1]
    slot = jnp.arange(-margin, slots + 1 + margin)
    place = state.window_start[:, None] + slot
    in_completion = place >= state.prompt_length[:, None]
    inside = jnp.clip(slot, 0, slots - 1)
    filled = is_filled(state)[:, inside] & (slot >= 0) & (slot < slots) & in_completion
    text = jnp.where(filled, state.tokens[:, inside], UNKNOWN)
    committed = in_completion & (place < state.text_length[:, None])
    at = jnp.clip(place, 0, state.text.shape[1] - 1)
    return jnp.where(committed, jnp.take_along_axis(state.text, at, axis=1), text)


def without_completing_tokens(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows
) -> Array:
    """Sets the logits ``[R, V]`` of tokens that would complete a word to −inf."""

    def forbid(logits: Array) -> Array:
        return forbidden(logits, completing_tokens(state, options, rows))

    return jax.lax.cond(_any_words(options), forbid, lambda logits: logits, logits)


def forbidden(logits: Array, ids: Array) -> Array:
    """Sets the logits ``[R, V]`` of tokens ``ids [R, F]`` to −inf."""
    return logits.at[logit_places(logits, ids)].set(-jnp.inf, mode="drop")


def logit_places(logits: Array, ids: Array) -> tuple[Array, Array]:
    """Returns the indices of tokens ``ids [R, F]``. A negative index would count from the end, so
    `NO_TOKEN` becomes V, which a scatter drops."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return rows, jnp.where(ids == NO_TOKEN, logits.shape[1], ids)


def _any_words(options: Options) -> Array:
    assert options.bad_words is not None
    return (options.bad_words != NO_TOKEN).any()


def completing_tokens(state: DecodeState, options: Options, rows: HeadRows) -> Array:
    """Returns the tokens that would complete a word at the rows' slots, int32 ``[R, K * L]``,
    padded with `NO_TOKEN`."""
    assert options.bad_words is not None
    words = options.bad_words[rows.sequence]
    length = words.shape[2]
    margin = length - 1
    offset = jnp.arange(-margin, margin + 1)
    around = text_around(state, margin)[
        rows.sequence[:, None], margin + rows.slot[:, None] + offset
    ]
    seen = rows.slot[:, None] + offset < rows.sees[:, None]
    around = jnp.where(seen, around, UNKNOWN)[:, None]
    exists = words != NO_TOKEN
    found = []
    for j in range(length):
        # The text where the word would be if its token j were at the slot.
        segment = around[..., margin - j : margin - j + length]
        agrees = (segment == words) | ~exists | (jnp.arange(length) == j)
        completes = agrees.all(axis=-1) & exists[..., j]
        found.append(jnp.where(completes, words[..., j], NO_TOKEN))
    return jnp.concatenate(found, axis=-1)


def keep_apart(state: DecodeState, options: Options, chosen: Array, tokens: Array) -> Array:
    """Returns which of the ``chosen [N, P]`` slots can be filled together with ``tokens [N, P]``.

    The last new token of every word that they would complete is left out. In anchored sequences
    none is, since verification rejects such a draft.
    """

    def apart(chosen: Array) -> Array:
        return _apart(state, options, chosen, tokens)

    return jax.lax.cond(_any_words(options), apart, lambda chosen: chosen, chosen)


def _apart(state: DecodeState, options: Options, chosen: Array, tokens: Array) -> Array:
    assert options.bad_words is not None
    words = options.bad_words
    margin = words.shape[2] - 1
    text = text_around(state, margin)
    new = jnp.pad(chosen, ((0, 0), (margin, margin + 1)))
    text = jnp.where(new, jnp.pad(tokens, ((0, 0), (margin, margin + 1))), text)
    starts = jnp.arange(text.shape[1] - margin)
    places = starts[:, None] + jnp.arange(words.shape[2])
    exists = (words != NO_TOKEN)[:, None]
    agrees = (text[:, places][:, :, None] == words[:, None]) | ~exists
    new_in_word = new[:, places][:, :, None] & exists
    completed = agrees.all(axis=-1) & new_in_word.any(axis=-1)
    last = margin - jnp.argmax(jnp.flip(new_in_word, axis=-1), axis=-1)
    left_out = jnp.where(completed, starts[:, None] + last, text.shape[1])
    sequences = jnp.arange(text.shape[0])[:, None, None]
    out = jnp.zeros(text.shape, bool).at[sequences, left_out].set(True, mode="drop")
    return chosen & (options.anchored[:, None] | ~out[:, margin : margin + chosen.shape[1]])
