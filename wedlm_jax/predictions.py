"""What the rows of a window say: tokens and how sure they are, which are kept and which committed.

The head runs on few rows of a forward; paper rows fill by the fill rule, verified ones by what
their own autoregressive rows accept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.bad_words import keep_apart, text_around
from wedlm_jax.decode_state import DecodeState, first_index
from wedlm_jax.logit_options import adjusted_logits
from wedlm_jax.logprobs import Logprobs, token_logprobs
from wedlm_jax.model import Transformer
from wedlm_jax.penalties import TokenUse, token_use
from wedlm_jax.sampling import RowParams, choose_tokens, entropy, fill_rule
from wedlm_jax.sharding import constrain
from wedlm_jax.verification import accepted, draft_rule


class Guesses(NamedTuple):
    """Tokens to fill, and their log-probabilities where some row asks for them."""

    tokens: Array
    logprobs: Logprobs | None


class HeadRows(NamedTuple):
    """The rows of a window that pass the head, ``[B, N]`` each, and what they predict.

    Masks stand behind the filled slots, at most W of them, so the head runs on so many rows
    only. A row of a filled slot predicts the next one: that of an autoregressive row's last
    one is wanted too, and those of all of a verified row's, which stand in order.

    Attributes:
      places: int32, physical places.
      slots: int32, the slot whose token each of them predicts.
      is_mask: bool, it is a mask and predicts itself.
      is_draft: bool, a filled slot's row, and the slot behind holds a draft.
    """

    places: Array
    slots: Array
    is_mask: Array
    is_draft: Array


def head_rows(
    state: DecodeState, params: RowParams, order: Array, *, slots: int, count: int
) -> HeadRows:
    """``count`` rows of each window, of which the first ``slots`` in ``order [B, P]`` were run."""
    exists = jnp.arange(order.shape[1]) < state.active[:, None]
    num_filled = (state.filled & exists).sum(axis=-1)[:, None]
    first = num_filled - (params.window == 0)[:, None]
    if params.verified is not None:
        first = jnp.where(params.verified[:, None], 0, first)
    place = first + jnp.arange(count)
    is_mask = (place >= num_filled) & (place < state.active[:, None])
    follows = params.anchored[:, None] & (place < num_filled)
    place = jnp.clip(place, 0, slots - 1)
    predicted = jnp.take_along_axis(order, place, axis=1) + follows
    return HeadRows(place, predicted, is_mask, follows & (predicted < num_filled))


def guess(
    model: Transformer,
    state: DecodeState,
    params: RowParams,
    use: TokenUse | None,
    hidden: Array,
    slots: Array,
) -> tuple[Guesses, Array]:
    """Tokens for ``slots [B, N]`` from the hidden states ``[B, N, D]`` that predict them, and
    how uncertain each is: entropies ``[B, N]``."""
    raw = token_logits(model, hidden)
    # Positions count from the committed length before this forward's commit.
    logits = adjusted_logits(raw, state, params, slots, use)
    tokens = choose_tokens(logits, *_streams(state, params, slots), params)
    logprobs = state.logprobs and token_logprobs(raw, tokens, state.logprobs.top.shape[-1])
    return Guesses(tokens, logprobs), entropy(logits)


def first_token(model: Transformer, state: DecodeState, params: RowParams) -> Guesses:
    """What the last token of the prompt predicts, ``[B]``: the first of an anchored row. Nothing
    of the rows has been decoded yet."""
    use = token_use(state, params, model.config.vocab_size)
    slots = jnp.zeros_like(state.lengths)[:, None]
    guesses, _ = guess(model, state, params, use, state.prompt_end[:, None], slots)
    return jax.tree.map(lambda x: x[:, 0], guesses)


def fill(
    state: DecodeState, params: RowParams, head: HeadRows, tokens: Array, entropies: Array
) -> Array:
    """Which of the head's rows fill a mask with their ``tokens``, bool ``[B, N]``."""
    chosen = fill_rule(
        entropies, head.slots, head.is_mask, params.entropy_threshold, params.position_penalty
    )
    if params.bad_words is None:
        return chosen
    text = text_around(state, params.bad_words)
    return keep_apart(text, params.bad_words, head.slots, chosen, tokens)


def verify(
    state: DecodeState,
    params: RowParams,
    head: HeadRows,
    tokens: Array,
    entropies: Array,
    chosen: Array,
    run: Array,
) -> tuple[Array, Array, Array]:
    """``chosen [B, N]`` and ``run [B]`` with those of verified rows in their places, and the head's
    row ``[B]`` that predicts what stands behind the run of these."""
    assert params.verified is not None
    assert params.draft_budget is not None
    at = jnp.minimum(head.slots, state.tokens.shape[1] - 1)
    drafts = jnp.take_along_axis(state.tokens, at, axis=1)
    right = accepted(tokens, drafts, head.is_draft)
    last = jnp.where(params.verified, right.sum(axis=-1), 0)
    run = jnp.where(params.verified, last + 1, run)
    whole = last == head.is_draft.sum(axis=-1)
    new = draft_rule(entropies, head.is_mask & whole[:, None], params.draft_budget)
    return jnp.where(params.verified[:, None], right | new, chosen), run, last


def _streams(state: DecodeState, params: RowParams, slots: Array) -> tuple[Array, Array]:
    """What names the random stream of each of ``slots [B, N]``: any stable name serves.

    For an anchored row it is the place in the completion alone. A draft is then drawn with the
    numbers that choose between it and all other tokens when it is verified.
    """
    forwards = jnp.broadcast_to(state.num_forwards[:, None], slots.shape)
    anchored, index = params.anchored[:, None], first_index(state)[:, None] + slots
    return jnp.where(anchored, 0, slots), jnp.where(anchored, index + 1, forwards)


def token_logits(model: Transformer, hidden: Array) -> Array:
    """float32 logits ``[..., V]`` with the mask token's own at −inf: a mask is never emitted."""
    logits = constrain(model.logits(hidden), "batch", None, "vocab")
    if model.config.mask_token_id is not None:
        logits = logits.at[..., model.config.mask_token_id].set(-jnp.inf)
    return logits
