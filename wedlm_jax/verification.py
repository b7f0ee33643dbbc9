"""Verified decoding: masks draft, and the model's own autoregressive rows check.

Every filled row of a window predicts the token behind it, as in autoregressive decoding. In
the leading run, which stands first in physical order, that row sees exactly the text before
it. So the forward that would commit a run says at once what autoregressive decoding would have
put into each of its places. The run is committed as far as it agrees; the next token is then
known for certain, and stands in front of the next window (the row is *anchored*):

    slot     0        1 .. d       d+1 .. d+W
    holds    known    drafts       masks
    its row  chooses slot 1 .. d+1               drafts behind slot d+1

The first mask drafts what the last run row knows for certain, so a window holds W - 1 drafts at
most, and a forward adds 1 to W tokens to the text.

Theorem. Let each place i of a completion have its own random numbers g_i, a function of the
row's seed and of i alone, and let c(x, i) = argmax_v(logits(v | x) / T + g_iv) after truncation
(for T = 0 the plain argmax). Then verified decoding returns the tokens x_i = c(x_<i, i), which
are those that autoregressive decoding returns for the same seed, whatever the drafts were.
Proof: a token enters the text only as the choice of a row whose whole context is text. For an
accepted draft the choice and the draft are the same token; the first choice that differs is
taken instead of the draft; and what stands behind is discarded. With Gumbel numbers, c is a
sample of softmax(logits / T) truncated (the Gumbel-max trick), and these are independent from
place to place; so the distribution, too, is that of autoregressive sampling.

A draft is the mask's own choice with the same g_i. It is accepted with a probability of at least
(1 - TV) / (1 + TV), TV being the distance of the mask's distribution from the row's (Daliri,
Musco and Suresh, 2024, arXiv 2408.07978); accepting with min(1, p / q) and drawing anew from
what is left would accept 1 - TV, but its result would depend on the drafts, and so on the window
and on what else a machine does.

The conditions: choices must be computed alike at every shape of a forward. In float32 they differ
only where two logits tie within rounding; in bfloat16 such ties are common.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array


def accepted(tokens: Array, drafts: Array, is_draft: Array) -> Array:
    """bool ``[B, N]``: the drafts before the first that is not the ``tokens`` chosen in its place.

    Args:
      tokens, drafts: int32 ``[B, N]``, for each place in a row.
      is_draft: bool ``[B, N]``, False behind the last.
    """
    return jnp.cumprod(is_draft & (tokens == drafts), axis=-1).astype(bool)


def rejected(filled: Array, run: Array, verified: Array) -> Array:
    """bool ``[B, P]``: the ``filled [B, P]`` slots behind the run ``[B]`` of verified rows ``[B]``:
    what was drafted behind a wrong token."""
    return filled & (jnp.arange(filled.shape[1]) >= run[:, None]) & verified[:, None]


def draft_rule(entropies: Array, is_mask: Array, budget: Array) -> Array:
    """The masks that draft, bool ``[B, N]``: those in front, as long as their entropies add up to
    less than ``budget [B]`` nats; never the first, whose token is known.

    The sum bounds how bold the draft is as a whole: the further a wrong token stands in front, the
    more is discarded behind it.

    Args:
      entropies: float32 ``[B, N]``.
      is_mask: bool ``[B, N]``, the masks, in logical order.
    """
    behind_first = is_mask & (jnp.cumsum(is_mask, axis=-1) > 1)
    spent = jnp.cumsum(jnp.where(behind_first, entropies, 0.0), axis=-1)
    return behind_first & (spent < budget[:, None])
