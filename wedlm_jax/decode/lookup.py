"""Prompt lookup: drafts copied from the sequence's own text.

Where the last tokens of a text occurred before, what followed them then is likely to follow again:
in edits, summaries, quotations, code, loops. So the tokens after the latest occurrence of the
longest repeated ending are drafts, for any model, and verification (`wedlm_jax.decode.verified`)
makes of them what it makes of the drafts of masks::

    text     . . . the cat sat on the mat . . . . the cat     ending of 2 tokens that occurred
                           ^^^^^^^^^^^^^^                     drafts

A draft costs a token of a forward, right or wrong, so how many are taken is decided before each
forward, for all sequences together: as many as commit the most tokens per second. How likely a
copied token is right is learnt from every token that is committed, whether it was drafted or not,
by the length of the repeated ending; what a forward costs comes from the engine's measurements.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

LONGEST = 4
"""Tokens of the longest ending that is searched for; longer ones would be found at older places."""
FARTHEST = 8
"""Tokens up to which the ending that was found is followed backwards: a run that has been copied
for long goes on more probably."""
PRIOR = np.array([0.2, 0.35, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85], np.float32)
"""How often the copied token is right after an ending of 1 .. `FARTHEST` tokens, to begin with."""
PRIOR_WEIGHT, SHARED_WEIGHT = 2.0, 6.0
"""Observations that the prior counts as, and that those of all sequences count as for one."""
MEMORY = 40.0
"""Observations of a sequence, for a length, after which older ones have mostly faded."""
MASKS_RATE = 0.1
"""How fast the running mean of masks' drafts follows."""
GAIN = 1.1
"""How many times as many tokens per second drafts must promise: what they promise is uncertain."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Lookup:
    """What follows each text by its own past, and how often that was right.

    N sequences, at most L drafts, endings of C = `FARTHEST` lengths.

    Attributes:
      tokens: int32 ``[N, L]``, the tokens that followed the ending's latest occurrence.
      match: int32 ``[N]``, the length of that ending; 0 where it never occurred before.
      copied: int32 ``[N]``, how many of them are drafts in the window; 0 where masks drafted.
      masks: float32 ``[N]``, drafts of masks that a forward without copies has committed lately.
      tried, right: float32 ``[N, C]``, by the length of the ending: copies that committed text has
        shown to be right or wrong, and the right ones; older ones count less. They stay when
        another sequence takes the place: prompts that come together are often alike.
    """

    tokens: Array
    match: Array
    copied: Array
    masks: Array
    tried: Array
    right: Array


def no_lookup(sequences: int, most: int) -> Lookup:
    """Returns what is known before any text, for N sequences and at most L drafts."""

    def zeros(*shape: int, dtype: Any = jnp.int32) -> Array:
        return jnp.zeros((sequences, *shape), dtype)  # an array each, since each is overwritten

    return Lookup(
        tokens=zeros(most),
        match=zeros(),
        copied=zeros(),
        masks=zeros(dtype=jnp.float32),
        tried=zeros(FARTHEST, dtype=jnp.float32),
        right=zeros(FARTHEST, dtype=jnp.float32),
    )


class Found(NamedTuple):
    """Holds what `find` found: ``tokens [N, L]`` and ``match [N]`` of `Lookup`."""

    tokens: Array
    match: Array


def find(text: Array, length: Array, most: int) -> Found:
    """Finds what follows each text by its own past.

    Of the earlier places whose last tokens are those of the text, those win that share most, up to
    `LONGEST`, and of these the latest. Where the text ends before there are L tokens, what has been
    copied is copied again: a loop goes on.

    Args:
      text: int32 ``[N, S]``.
      length: int32 ``[N]``.
      most: L.
    """
    place = jnp.arange(text.shape[1], dtype=jnp.int32)
    end = length[:, None] - 1
    # One pass over the text: whether place j, and the k - 1 places before it, are the text's last.
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
    """Returns the column in ``tried`` and ``right`` of each of L copied tokens, int32 ``[N, L]``: a
    token after k right ones has an ending that is longer by k."""
    return jnp.clip(match[:, None] + jnp.arange(most), 1, FARTHEST) - 1


def learn(lookup: Lookup, tokens: Array, committed: Array) -> Lookup:
    """Learns from what was committed, whether it was drafted or not.

    Args:
      tokens: int32 ``[N, C]``, of which the first ``committed [N]`` are new text.
    """
    most = min(lookup.tokens.shape[1], tokens.shape[1])
    agree = tokens[:, :most] == lookup.tokens[:, :most]
    right = jnp.cumprod(agree, axis=1)
    # A token says something only if those before it were as copied.
    tried = jnp.pad(right, ((0, 0), (1, 0)), constant_values=1)[:, :most]
    known = (jnp.arange(most) < committed[:, None]) & (lookup.match > 0)[:, None]
    column = length_class(lookup.match, most)[:, :, None] == jnp.arange(FARTHEST)

    def counted(what: Array) -> Array:
        return jnp.where(column, (what * known)[:, :, None], 0).sum(axis=1).astype(jnp.float32)

    new = counted(tried)
    kept = jnp.exp(-new / MEMORY)
    # Without copies a forward commits a row's choice and the drafts of masks.
    change = jnp.where((lookup.copied == 0) & (committed > 0), committed - 1 - lookup.masks, 0)
    return dataclasses.replace(
        lookup,
        masks=lookup.masks + MASKS_RATE * change,
        tried=lookup.tried * kept + new,
        right=lookup.right * kept + counted(right),
    )


def survival(lookup: Lookup) -> Array:
    """Returns the probability that each copied token and all before it are right, float32
    ``[N, L]``; 0 where there is none."""
    # Few observations of a sequence are filled up with those of all, and these with the prior.
    everybody = lookup.right.sum(axis=0) + PRIOR_WEIGHT * PRIOR
    shared = everybody / (lookup.tried.sum(axis=0) + PRIOR_WEIGHT)
    rate = (lookup.right + SHARED_WEIGHT * shared) / (lookup.tried + SHARED_WEIGHT)
    most = lookup.tokens.shape[1]
    each = jnp.take_along_axis(rate, length_class(lookup.match, most), axis=1)
    return jnp.where((lookup.match > 0)[:, None], jnp.cumprod(each, axis=1), 0.0)


def gains(lookup: Lookup, room: Array) -> Array:
    """Returns the tokens that each further copy brings on average, float32 ``[N, L]``, falling from
    copy to copy; 0 beyond the ``room [N]`` for copies.

    A wrong copy has a price where masks draft: they saw it, so the next forward lacks their drafts.
    Then the first copies may cost more than they bring, and only many of them pay: these count with
    what they bring together.
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


def paying_drafts(gains: Array, tokens: Array, committed: Array, costs: ForwardCosts) -> Array:
    """Returns how many drafts each sequence takes so that a forward commits the most tokens a
    second, int32 ``[N]``.

    The most promising drafts of all sequences come first. With m of them the forward commits the
    sum of their gains more, and costs what a forward of m tokens more costs. Costs are steps: often
    several drafts are free, and one more would be expensive.

    Args:
      gains: float32 ``[N, L]``, from `gains`; 0 for none.
      tokens: int32, of the forward without drafts.
      committed: float32, tokens that it commits on average.
      costs: costs of forwards.
    """
    flat = gains.reshape(-1)
    # Of equal gains the sequence's earlier drafts come first, since the sort is stable.
    order = jnp.argsort(-flat, stable=True)
    more = jnp.pad(jnp.cumsum(flat[order]), (1, 0))
    rate = (committed + more) / costs.seconds(tokens + jnp.arange(flat.shape[0] + 1))
    best = jnp.argmax(rate)
    best = jnp.where(rate[best] > GAIN * rate[0], best, 0)
    taken = jnp.zeros(flat.shape, bool).at[order].set(jnp.arange(flat.shape[0]) < best)
    return (taken & (flat > 0)).reshape(gains.shape).sum(axis=1, dtype=jnp.int32)


class ForwardCosts(NamedTuple):
    """What forwards cost.

    Attributes:
      sizes: the static sizes of a forward, ascending.
      of_size: float32 ``[S]``, seconds of each, or anything in proportion to them.
    """

    sizes: tuple[int, ...]
    of_size: Array

    def seconds(self, tokens: Array) -> Array:
        """Returns the cost of forwards of so many tokens: of the smallest size that holds them;
        beyond the largest, forwards run in parts."""
        largest = self.sizes[-1]
        whole = jnp.maximum(tokens - 1, 0) // largest
        rest = tokens - whole * largest
        index = (jnp.array(self.sizes) < rest[..., None]).sum(axis=-1)
        return self.of_size[index] + whole * self.of_size[-1]
