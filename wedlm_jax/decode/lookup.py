"""Prompt lookup: drafts copied from the sequence's own text.

If the last tokens of a text have occurred before, what followed them then is likely to follow
again: in edits, summaries, quotations, code, loops. So the tokens after the latest occurrence of
the longest repeated ending serve as drafts, for any model, and are verified like the drafts of
masks (see `wedlm_jax.decode.verified`)::

    text     . . . the cat sat on the mat . . . . the cat     ending of 2 tokens that occurred
                           ^^^^^^^^^^^^^^                     drafts

A draft costs a token of a forward, right or wrong. So the number of drafts is chosen before each
forward, for all sequences together, to commit the most tokens per second. How likely a copied token
is to be right is learnt, by the length of the repeated ending, from every committed token, drafted
or not; what a forward costs comes from the engine's measurements.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

LONGEST = 4
"""Maximum length of an ending that counts in the search; longer matches would prefer older places.
"""
FARTHEST = 8
"""Maximum tokens for which a match is followed backwards: the longer a run has been copied, the
likelier it is to continue."""
PRIOR = np.array([0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85], np.float32)
"""The initial probability that a copied token is right, after an ending of 1 .. `FARTHEST` tokens.
"""
PRIOR_WEIGHT, SHARED_WEIGHT = 2.0, 6.0
"""The weights, in observations, of the prior and of the mean over all sequences."""
MEMORY = 40.0
"""The number of observations, per sequence and length, after which older ones have mostly faded."""
MASKS_RATE = 0.1
"""The rate at which the running mean of masks' drafts is updated."""
GAIN, GAIN_ALONE = 1.1, 1.2
"""The factors by which drafts must promise more tokens per second, since promises are uncertain:
while others wait for places, and while none do. In the second case a batch ends with its slowest
sequence, and may have gained nothing if that one had no drafts."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
    """The continuations copied from each text's past, and how often copies were right.

    N sequences, at most L drafts, endings of C = `FARTHEST` lengths.

    Attributes:
      tokens: int32 ``[N, L]``, the tokens that followed the ending's latest occurrence.
      match: int32 ``[N]``, the length of that ending; 0 where it never occurred before.
      copied: int32 ``[N]``, how many of ``tokens`` are drafts in the window; 0 where masks drafted.
      masks: float32 ``[N]``, mean number of masks' drafts that a forward without copies commits.
      tried, right: float32 ``[N, C]``, by the length of the ending: how many copies the committed
        text has confirmed or refuted, and how many it has confirmed; older ones count less. The
        counts survive when another sequence takes the place, since prompts that arrive together
        are often alike.
    """

    tokens: Array
    match: Array
    copied: Array
    masks: Array
    tried: Array
    right: Array


def no_lookup(sequences: int, most: int) -> Lookup:
    """Returns the initial state, for N sequences and at most L drafts."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((sequences, *shape), dtype)  # separate arrays, since each is overwritten

    return Lookup(
        tokens=zeros(most),
        match=zeros(),
        copied=zeros(),
        masks=zeros(dtype=jnp.float32),
        tried=zeros(FARTHEST, dtype=jnp.float32),
        right=zeros(FARTHEST, dtype=jnp.float32),
    )


class Found(NamedTuple):
    """The result of `find`: ``tokens [N, L]`` and ``match [N]`` of `Lookup`."""

    tokens: Array
    match: Array


def find(text: Array, length: Array, most: int) -> Found:
    """Finds a continuation of each text in its own past.

    Chooses the earlier place with the longest match to the end of the text, counting up to
    `LONGEST` tokens; among equals, the latest. If fewer than L tokens follow that place, they are
    repeated, which continues a loop. ``text`` is int32 ``[N, S]``, ``length`` int32 ``[N]``, and
    ``most`` is L.
    """
    place = jnp.arange(text.shape[1], dtype=jnp.int32)
    end = length[:, None] - 1
    # One pass over the text: whether the k + 1 tokens up to place j equal the text's last k + 1.
    same = place < end
    shared = jnp.zeros_like(text)
    for k in range(LONGEST):
        last = jnp.take_along_axis(text, jnp.maximum(end - k, 0), axis=1)
        before = jnp.pad(text, ((0, 0), (k, 0)))[:, : text.shape[1]]
        same &= (before == last) & (place >= k)
        shared += same
    best = jnp.max(shared * text.shape[1] + place, axis=1)[:, None]
    at = jnp.where(best >= text.shape[1], best % text.shape[1], end)

    back = jnp.arange(FARTHEST)
    theirs = jnp.take_along_axis(text, jnp.maximum(at - back, 0), axis=1)
    ours = jnp.take_along_axis(text, jnp.maximum(end - back, 0), axis=1)
    agree = (theirs == ours) & (back <= at) & (at < end)
    match = jnp.cumprod(agree, axis=1).sum(axis=1, dtype=jnp.int32)

    period = jnp.maximum(end - at, 1)
    source = at + 1 + jnp.arange(most) % period
    tokens = jnp.take_along_axis(text, jnp.clip(source, 0, text.shape[1] - 1), axis=1)
    return Found(tokens, match)


def length_class(match: Array, most: int) -> Array:
    """Returns the column in ``tried`` and ``right`` for each of L copied tokens, int32 ``[N, L]``:
    after k right tokens the ending is k tokens longer."""
    return jnp.clip(match[:, None] + jnp.arange(most), 1, FARTHEST) - 1


def learn(lookup: Lookup, tokens: Array, committed: Array) -> Lookup:
    """Updates the counts with the committed tokens, drafted or not: the first ``committed [N]`` of
    ``tokens``, int32 ``[N, C]``."""
    most = min(lookup.tokens.shape[1], tokens.shape[1])
    agree = tokens[:, :most] == lookup.tokens[:, :most]
    right = jnp.cumprod(agree, axis=1)
    # A token is an observation only if all tokens before it were as copied.
    tried = jnp.pad(right, ((0, 0), (1, 0)), constant_values=1)[:, :most]
    known = (jnp.arange(most) < committed[:, None]) & (lookup.match > 0)[:, None]
    column = length_class(lookup.match, most)[:, :, None] == jnp.arange(FARTHEST)

    def counted(what: Array) -> Array:
        return jnp.where(column, (what * known)[:, :, None], 0).sum(axis=1).astype(jnp.float32)

    new = counted(tried)
    kept = jnp.exp(-new / MEMORY)
    # Without copies a forward commits one row's choice and the drafts of masks.
    change = jnp.where((lookup.copied == 0) & (committed > 0), committed - 1 - lookup.masks, 0)
    return dataclasses.replace(
        lookup,
        masks=lookup.masks + MASKS_RATE * change,
        tried=lookup.tried * kept + new,
        right=lookup.right * kept + counted(right),
    )


def survival(lookup: Lookup) -> Array:
    """Returns the probability that each copied token and all before it are right, float32
    ``[N, L]``; 0 where there is no copy."""
    # A sequence with few observations relies on those of all sequences, and these on the prior.
    everybody = lookup.right.sum(axis=0) + PRIOR_WEIGHT * PRIOR
    shared = everybody / (lookup.tried.sum(axis=0) + PRIOR_WEIGHT)
    rate = (lookup.right + SHARED_WEIGHT * shared) / (lookup.tried + SHARED_WEIGHT)
    most = lookup.tokens.shape[1]
    each = jnp.take_along_axis(rate, length_class(lookup.match, most), axis=1)
    return jnp.where((lookup.match > 0)[:, None], jnp.cumprod(each, axis=1), 0.0)


def gains(lookup: Lookup, room: Array) -> Array:
    """Returns the expected tokens that each additional copy gains, float32 ``[N, L]``, never
    increasing from copy to copy; 0 beyond the ``room [N]`` for copies.

    Where masks draft, a wrong copy has a price: the masks saw it, so the next forward lacks their
    drafts. The first copies may then cost more than they gain while many together pay; each of
    these counts with the mean gain of the group.
    """
    right = survival(lookup)
    before = jnp.pad(right, ((0, 0), (1, 0)), constant_values=1.0)[:, :-1]
    each = right - lookup.masks[:, None] * (before - right)
    count = jnp.arange(1, right.shape[1] + 1)
    inside = count <= room[:, None]
    mean = jnp.where(inside, jnp.cumsum(each, axis=1) / count, -jnp.inf)
    best = mean.max(axis=1, keepdims=True)
    together = count <= 1 + jnp.argmax(mean, axis=1)[:, None]
    falling = jax.lax.cummin(jnp.where(together, best, each), axis=1)
    return jnp.where(inside, jnp.maximum(falling, 0.0), 0.0)


def worth(output: Array, forwards: Array, others_wait: Array) -> Array:
    """Returns what a token of each sequence is worth, float32 ``[N]``.

    If others wait for the places of those that finish, all tokens are worth the same. If nobody
    waits, a batch ends with its slowest sequence, and a sequence that is ahead gains nothing by
    getting further ahead. If sequence i commits Eᵢ tokens per forward, one token for each sequence
    takes Σ 1 / Eᵢ forwards; each further token per forward of sequence i lowers this by 1 / Eᵢ².
    ``output`` and ``forwards`` are the tokens and forwards so far, int32 ``[N]``.
    """
    rate = (output + PRIOR_WEIGHT) / (forwards + PRIOR_WEIGHT)
    return jnp.where(others_wait, 1.0, 1 / rate**2)


def paying_drafts(
    gains: Array,
    tokens: Array,
    committed: Array,
    costs: ForwardCosts,
    value: Array | float = 1.0,
    least: Array | float = GAIN,
) -> Array:
    """Returns how many drafts each sequence should take so that a forward commits the most tokens
    per second, int32 ``[N]``.

    The most promising drafts of all sequences come first. The first m of them add the sum of their
    gains to the tokens committed, and m tokens to the forward. Its cost rises in steps: often
    several drafts are free, and one more would be expensive.

    Args:
      gains: float32 ``[N, L]``, from `gains`; 0 where there is no draft.
      tokens: int32, tokens of the forward without drafts.
      committed: float32 ``[N]``, tokens that this forward commits on average; 0 where there is no
        sequence.
      value: float32 ``[N]``, from `worth`: the weight of each sequence's tokens.
      least: minimum ratio of the weighted tokens per second to those without drafts.
    """
    flat = (gains * jnp.broadcast_to(value, committed.shape)[:, None]).reshape(-1)
    # The sort is stable, so among equal gains a sequence's earlier drafts come first.
    order = jnp.argsort(-flat, stable=True)
    more = jnp.pad(jnp.cumsum(flat[order]), (1, 0))
    rate = ((committed * value).sum() + more) / costs.seconds(tokens + jnp.arange(len(more)))
    best = jnp.argmax(rate)
    best = jnp.where(rate[best] > least * rate[0], best, 0)
    taken = jnp.zeros(flat.shape, bool).at[order].set(jnp.arange(len(flat)) < best)
    return (taken & (flat > 0)).reshape(gains.shape).sum(axis=1, dtype=jnp.int32)


class ForwardCosts(NamedTuple):
    """The static sizes of a forward, ascending, and the seconds of each, float32 ``[S]``, or
    numbers proportional to them."""

    sizes: tuple[int, ...]
    of_size: Array

    def seconds(self, tokens: Array) -> Array:
        """Returns the cost of forwards with these token counts. Each runs at the smallest size that
        holds its tokens; beyond the largest size, it runs in parts."""
        largest = self.sizes[-1]
        whole = jnp.maximum(tokens - 1, 0) // largest
        rest = tokens - whole * largest
        index = (jnp.array(self.sizes) < rest[..., None]).sum(axis=-1)
        return self.of_size[index] + whole * self.of_size[-1]
