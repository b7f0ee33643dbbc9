"""Modes "verified" and "ar": masks draft, and the model's own autoregressive rows verify.

The row of a filled slot predicts the next token, as in autoregressive decoding. In the leading
run, which comes first in physical order, that row sees exactly the text before it. So one forward
computes what autoregressive decoding would choose at each position of the run. Drafts are committed
up to the first that differs from that choice; the choice itself is then known and opens the next
window:

    slot     0        1 .. d       d+1       d+2 .. d+W
    holds    known    drafts       mask      masks
    its row  chooses slot 1 .. d+1 (unused)  drafts for slots d+2 ..

The token of slot d+1 is chosen by the last row of the run, which knows more than the mask there. So
a window holds at most W - 1 drafts, and a forward adds 1 to W tokens to the text. With W = 0 only
slot 0 is left, which is autoregressive decoding.

Theorem. Let each place i of a completion have its own random numbers g_i, a function of the
sequence's seed and of i alone, and let c(x, i) = argmax_v(logits(v | x) / T + g_iv) after
truncation (for T = 0 the plain argmax). Then verified decoding returns the tokens
x_i = c(x_<i, i), which are those that autoregressive decoding returns for the same seed,
whatever the drafts were. Proof: a token enters the text only as the choice of a row whose whole
context is text. For an accepted draft the choice and the draft are the same token; the first
choice that differs is taken instead of the draft; and everything after it is discarded. With
Gumbel numbers, c is a sample of the truncated softmax(logits / T) (the Gumbel-max trick), and these
are independent from place to place; so the distribution, too, is that of autoregressive
sampling.

A draft is the mask's own choice with the same g_i. It is accepted with a probability of at least
(1 - TV) / (1 + TV), TV being the total variation distance between the mask's distribution and the
row's (Daliri, Musco and Suresh, 2024, arXiv 2408.07978). Speculative sampling, which accepts with
min(1, p / q) and resamples the rest, would accept 1 - TV, but its result would depend on the
drafts, and so on the window and on what else runs on the machine.

The theorem assumes that choices are the same at every shape of a forward. In float32 they differ
only where two logits tie within rounding. In bfloat16 such ties are common; a deterministic engine
computes every forward of every program in one shape.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.backup import is_used
from wedlm_jax.decode.state import DecodeState, is_filled, is_mask, leading


class Verified(NamedTuple):
    """A forward's decisions for anchored windows.

    Attributes:
      run: int32 ``[N]``, leading slots that are text now: slot 0 and the accepted drafts.
      drafts: bool ``[N, P]``, masks to fill with drafts.
      kept: bool ``[N, P]``, filled slots that stay: those before the first wrong draft.
    """

    run: Array
    drafts: Array
    kept: Array


def predicted_slots(state: DecodeState) -> Array:
    """Returns the slots that need the head, bool ``[N, P+1]``: all active ones after slot 0, and
    the one after the run. The first mask's token is predicted by the row before it."""
    slot = jnp.arange(state.filled.shape[1] + 1)
    last = jnp.maximum(state.active - 1, is_filled(state).sum(axis=1))
    return (slot >= 1) & (slot <= last[:, None])


def verify(state: DecodeState, budget: Array | None, tokens: Array, entropies: Array) -> Verified:
    """Decides which drafts are accepted, and which masks draft next.

    Masks draft only where all drafts before them were right: otherwise they saw a wrong prefix. If
    the wrong draft is the one that backup masks assumed, those draft instead.

    Args:
      budget: see `draft_rule`.
      tokens, entropies: ``[N, P+1]`` by the slot that they predict.
    """
    slot = jnp.arange(state.filled.shape[1])
    filled = is_filled(state)
    run = right_run(state, tokens)
    # Masks saw all drafts. If one of those was wrong, the masks' predictions follow a wrong text.
    masks = is_mask(state) & (run == filled.sum(axis=1))[:, None]
    first, count = state.backup.start[:, None], state.backup.count[:, None]
    backup = (slot >= first) & (slot < first + count)
    masks = jnp.where(is_used(state, run)[:, None], backup, masks)
    kept = filled & (slot < run[:, None])
    return Verified(run, draft_rule(entropies[:, :-1], masks, budget), kept)


def right_run(state: DecodeState, tokens: Array) -> Array:
    """Returns the length of each window's run, int32 ``[N]``: slot 0 and the drafts up to the first
    wrong one. ``tokens [N, P+1]``, int32, or wider, is what the row before each slot chose."""
    slot = jnp.arange(state.filled.shape[1])
    is_draft = is_filled(state) & (slot >= 1)
    # Slot 0 holds text, which needs no check.
    right = (is_draft & (tokens[:, : len(slot)] == state.tokens)) | (slot == 0)
    return leading(right)


def draft_rule(entropies: Array, is_mask: Array, budget: Array | None) -> Array:
    """Chooses the masks that draft, bool ``[N, P]``: in logical order, as long as their entropies
    sum to less than ``budget [N]`` nats; never the first, whose token is known.

    A limit on the sum, rather than on each entropy, bounds the risk of the draft as a whole: one
    wrong token discards everything after it.

    Args:
      entropies: float32 ``[N, P]``.
      is_mask: bool ``[N, P]``, the masks, in logical order.
      budget: None where no sequence drafts.
    """
    if budget is None:
        return jnp.zeros_like(is_mask)
    after_first = is_mask & (jnp.cumsum(is_mask, axis=-1) > 1)
    # -log p of a sampled token is H on average, and of the most likely one at most H. So exp(-sum)
    # estimates the chance that the draft is right as a whole.
    spent = jnp.cumsum(jnp.where(after_first, entropies, 0.0), axis=-1)
    return after_first & (spent < budget[:, None])
