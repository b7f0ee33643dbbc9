"""Chooses the drafts of a window from left to right, each given the draft before it.

Masks are computed together and so do not see each other's drafts. A drafter with a
`wedlm_jax.model.lora.PreviousTokenHead` corrects each mask by the draft before it. That takes one
step for each mask, so only a mask's likeliest tokens are considered: a step then reads C rows of
the output projection per sequence instead of all V.

Drafts never change the text (`wedlm_jax.decode.verified`), so a likely token that is not considered
only costs speed.
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
from wedlm_jax.sharding import constrain

CANDIDATES = 32
"""C, the number of tokens that a mask's draft is chosen from."""

GROUPS = 128
"""The number of groups that tokens are divided into; only the best of each can be candidates. The
vocabulary sizes of the published models are multiples of it."""


class Candidates(NamedTuple):
    """The likeliest tokens of each row, int32 ``[..., C]``, and their log-probabilities, float32;
    −inf for tokens that may not be chosen."""

    tokens: Array
    logprobs: Array


def likeliest(logits: Array) -> Candidates:
    """Returns the candidates of ``logits [R, V]``: the C best among the best of `GROUPS` groups.

    Token v is in group v mod `GROUPS`, so tokens that are likely together are rarely in one group.
    Two passes over the logits find the best of the groups, on each device for its own part of the
    vocabulary; an exact search for the C likeliest tokens would have to sort all logits, or gather
    them.
    """
    vocab = logits.shape[-1]
    groups = min(GROUPS, vocab)
    padded = jnp.pad(logits, ((0, 0), (0, -vocab % groups)), constant_values=-jnp.inf)
    by_group = constrain(padded.reshape(len(logits), -1, groups), None, "vocab", None)
    best = by_group.max(axis=1)
    number = jnp.arange(by_group.shape[1], dtype=jnp.int32)[:, None]
    at = jnp.where(by_group == best[:, None], number, by_group.shape[1] - 1).min(axis=1)
    values, group = jax.lax.top_k(best, min(CANDIDATES, groups))
    tokens = jnp.take_along_axis(at, group, axis=1) * groups + group
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return Candidates(jnp.minimum(tokens, vocab - 1).astype(jnp.int32), values - total)


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
    """Chooses the drafts of masks again, from left to right, each with the token before it known.

    Args:
      hidden: ``[T, D]``, the forward's final hidden states.
      tokens, entropies: ``[N, P+1+M]``, the independent predictions for each slot, and of each
        backup mask.
      candidates: ``[N, P+1+M, C]``.

    Returns:
      tokens and entropies with those of masks replaced, except for each group's first mask.
    """
    sequences, slots = state.filled.shape
    masked = is_mask(state)
    # The first mask's token is chosen by a row of text. A window of W has W - 1 others.
    first = jnp.where(masked.any(axis=1), masked.argmax(axis=1), slots).astype(jnp.int32)
    sequence = jnp.arange(sequences)
    offset = jnp.arange(1, slots // 2, dtype=jnp.int32)
    slot = first[:, None] + offset
    place = plan.place[sequence[:, None], jnp.minimum(slot, slots - 1)]
    groups = _Masks(sequence, first, slot, slot, place, slot < state.active[:, None])
    if (backup := tokens.shape[1] - slots - 1) > 0:
        start, offset = state.backup.start[:, None], offset[: backup - 1]
        column = jnp.broadcast_to(slots + 1 + offset, (sequences, len(offset)))
        place = state.active[:, None] + offset
        here = offset < state.backup.count[:, None]
        second = _Masks(sequence, start[:, 0], start + offset, column, place, here)
        lacking = slots // 2 - 1 - len(offset)
        groups = jax.tree.map(
            lambda x, y: jnp.concatenate([x, jnp.pad(y, [(0, 0), (0, lacking)][: y.ndim])]),
            groups,
            second,
        )
    each = groups.sequence
    at = (plan.starts[:-1] + plan.chunk)[each, None] + groups.place
    at = jnp.minimum(at, hidden.shape[0] - 1)
    column = jnp.minimum(groups.column, tokens.shape[1] - 1)

    def step(before: Array, this: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        at, slot, column, here = this
        own = Candidates(*(x[each, column] for x in candidates))
        logits = own.logprobs + model.logit_corrections(hidden[at], before, own.tokens)
        rows = HeadRows(each, slot, jnp.ones_like(here), slot)
        token = choose_candidates(logits, own.tokens, state, options, rows)
        return token, (token, _entropy(logits, own.logprobs))

    known = tokens[each, groups.first]
    steps = tuple(x.T for x in (at, groups.slot, column, groups.here))
    _, chosen = jax.lax.scan(step, known, steps)
    column = jnp.where(groups.here & plan.window[each, None], column, tokens.shape[1])

    def put(old: Array, new: Array) -> Array:
        return old.at[each[:, None], column].set(new.T, mode="drop")

    return put(tokens, chosen[0]), put(entropies, chosen[1])


class _Masks(NamedTuple):
    """Groups of masks, G of them with at most K masks after the first.

    Attributes:
      sequence: int32 ``[G]``.
      first: int32 ``[G]``, the slot of a group's first mask.
      slot: int32 ``[G, K]``, the slots of the others.
      column: int32 ``[G, K]``, where their predictions are.
      place: int32 ``[G, K]``, their physical places in the window's span.
      here: bool ``[G, K]``, which of them exist.
    """

    sequence: Array
    first: Array
    slot: Array
    column: Array
    place: Array
    here: Array


def _entropy(logits: Array, before: Array) -> Array:
    """Returns the entropy in nats ``[N]`` of candidates' corrected ``logits [N, C]``; all other
    tokens count as a single one, whose logit is not corrected."""
    others = jnp.log1p(-jnp.minimum(jnp.exp(before).sum(axis=-1, keepdims=True), 1.0 - 1e-6))
    log_p = jax.nn.log_softmax(jnp.concatenate([logits, others], axis=-1))
    p = jnp.exp(log_p)
    return -jnp.where(p > 0, p * log_p, 0.0).sum(axis=-1)
