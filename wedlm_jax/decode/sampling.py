"""Which token a row's logits give, and how uncertain they are.

Temperature, then min-p, top-k and top-p, then a draw. Nothing is sorted: the smallest logit that
stays is found by bisection on the bits of floats. A program without trait "sampled" has nothing
of all this but an argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.decode.head_rows import HeadRows
from wedlm_jax.decode.noise import gumbel, random_key
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState

COLDEST = 1e-6
"""A temperature below divides logits as if it were this: they stay finite."""


def entropy(logits: Array) -> Array:
    """Returns the entropy in nats, float32 ``[...]``, of the softmax of ``logits [..., V]``.

    A logit of −inf has probability 0 and adds nothing.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    energy = jnp.where(weights > 0, weights * shifted, 0.0).sum(axis=-1)
    return jnp.log(total) - energy / total


def choose_tokens(logits: Array, state: DecodeState, options: Options, rows: HeadRows) -> Array:
    """Returns the token that each row chooses, int32 ``[R]``.

    Args:
      logits: float32 ``[R, V]``.
    """
    if options.temperature is None:
        return largest(logits)
    temperature = options.temperature[rows.sequence]
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)
    logits = logits / divisor[:, None]
    keys = random_keys(state, options, rows)
    limits = None
    if options.top_p is not None:
        assert options.top_k is not None
        assert options.min_p is not None
        limits = Limits(
            options.top_k[rows.sequence],
            options.top_p[rows.sequence],
            options.min_p[rows.sequence],
        )
    return sample(logits, keys, temperature > 0, limits)


class Limits(NamedTuple):
    """What a token is drawn from, ``[R]`` each, as in `wedlm_jax.params.SamplingParams`."""

    top_k: Array
    top_p: Array
    min_p: Array


def sample(logits: Array, keys: Array, drawn: Array, limits: Limits | None) -> Array:
    """Returns a token for each row of ``logits [R, V]``, int32 ``[R]``: where ``drawn [R]`` one
    drawn from their softmax within the limits, else the most likely."""

    # On a CPU the logits of one row stay in its cache while they are searched, and a row that
    # draws nothing costs nothing. Elsewhere many rows at once take hardly longer than one.
    return jax.lax.platform_dependent(
        logits, keys, drawn, limits, cpu=sample_one_by_one, default=sample_at_once
    )


def sample_at_once(logits: Array, keys: Array, drawn: Array, limits: Limits | None) -> Array:
    """Does `sample` for all rows together."""
    kept = logits if limits is None else truncate(logits, *limits)
    noise = jnp.where(drawn[:, None], gumbel(keys, logits.shape[-1]), 0.0)
    # The largest of logits plus Gumbel noise is a draw from their softmax.
    return largest(kept + noise)


def sample_one_by_one(logits: Array, keys: Array, drawn: Array, limits: Limits | None) -> Array:
    """Does `sample` for one row after another."""

    def row(given: tuple[Array, Array, Array, Limits | None]) -> Array:
        one = jax.tree.map(lambda x: x[None], given)
        return jax.lax.cond(given[2], lambda: sample_at_once(*one), lambda: largest(one[0]))[0]

    return jax.lax.map(row, (logits, keys, drawn, limits))


def largest(values: Array) -> Array:
    """Returns the place of the largest of ``values [R, V]``, the first of equal ones: int32
    ``[R]``. On a CPU two such passes take a quarter to an eighth of the time of an argmax."""
    vocab = values.shape[-1]
    place = jnp.arange(vocab, dtype=jnp.int32)
    found = jnp.where(values == values.max(axis=-1, keepdims=True), place, vocab - 1)
    return found.min(axis=-1)


def random_keys(state: DecodeState, options: Options, rows: HeadRows) -> Array:
    """Returns the key ``[R]`` of each row's random numbers: any stable name serves.

    For an anchored sequence it is the place in the completion alone. A draft is then drawn with
    the numbers that choose between it and all other tokens when it is verified. In mode "paper"
    it is the forward and the slot.
    """
    assert options.seed is not None
    anchored = options.anchored[rows.sequence]
    index = state.first_index[rows.sequence] + rows.slot
    outer = jnp.where(anchored, index + 1, state.num_forwards[rows.sequence])
    inner = jnp.where(anchored, 0, rows.slot)
    return jax.vmap(random_key)(options.seed[rows.sequence], outer, inner)


def truncate(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns ``logits [R, V]`` with −inf where min-p, then top-k, then top-p of the rest, leave
    tokens out. The most likely always stays.

    Args:
      logits: float32, already divided by the temperature.
      top_k: int32 ``[R]``, 0 for all. Exactly so many stay; of equal logits the lower ids.
      top_p: float32 ``[R]`` in (0, 1]. What stands before a token must not yet reach it.
      min_p: float32 ``[R]`` in [0, 1], a share of the largest probability.
    """
    vocab = logits.shape[-1]
    most = logits.max(axis=-1)
    logits = jnp.where(logits >= (most + jnp.log(min_p))[:, None], logits, -jnp.inf)
    lowest, highest = _as_integer(logits.min(axis=-1)), _as_integer(most)

    # Level x is the k-th largest: fewer than k tokens lie above it, and k do not below.
    all_stay = (top_k <= 0) | (top_k >= vocab)
    k = jnp.where(all_stay, vocab, top_k)
    highest_level = jnp.where(all_stay, lowest, highest)
    level = _first(lowest, highest_level, lambda x: _above(logits, x) < k)
    among = k - _above(logits, level)

    # What top-k left is all above the level, and some of those that reach it. Again the level is
    # wanted above which too little lies; it stands no lower than the first.
    weights = jnp.exp(logits - most[:, None])
    of_level = jnp.exp(_as_float(level) - most)
    reach = top_p * (_weight_above(logits, weights, level) + among * of_level)
    all_stay = top_p >= 1
    highest_level = jnp.where(all_stay, level, highest)
    narrower = _first(level, highest_level, lambda x: _weight_above(logits, weights, x) < reach)
    missing = reach - _weight_above(logits, weights, narrower)
    needed = jnp.ceil(missing / jnp.exp(_as_float(narrower) - most))
    needed = jnp.where(all_stay, vocab, jnp.clip(needed, 1, vocab)).astype(jnp.int32)
    among = jnp.minimum(needed, jnp.where(narrower > level, vocab, among))
    return _largest(logits, _as_float(narrower), among)


def _largest(logits: Array, level: Array, among: Array) -> Array:
    """``logits [R, V]`` above ``level [R]`` and the first ``among [R]`` of those that reach it."""
    level = level[:, None]
    equal = logits == level
    token = jnp.arange(logits.shape[-1])

    def up_to(last: Array) -> Array:
        return (equal & (token <= last[:, None])).sum(axis=-1) >= among

    # Several mostly reach it only where logits are rounded: then the last that stays is looked for.
    lowest = jnp.zeros_like(among)
    most = jnp.full_like(among, logits.shape[-1] - 1)
    tied = equal.sum(axis=-1) > among
    last = _first(jnp.where(tied, lowest, most), most, up_to)
    return jnp.where((logits > level) | (equal & (token <= last[:, None])), logits, -jnp.inf)


def _first(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """The smallest integer from ``low [R]`` to ``high [R]`` for which ``holds``, which is false
    before some integer and true from it on; ``high`` where it is never true."""

    def step(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without overflow
        found = holds(middle)
        return jnp.where(found, low, middle + (low < high)), jnp.where(found, middle, high)

    def open_(bounds: tuple[Array, Array]) -> Array:
        return (bounds[0] < bounds[1]).any()

    return jax.lax.while_loop(open_, step, (low, high))[1]


def _above(logits: Array, x: Array) -> Array:
    # Floats are added faster than integers on a CPU, and count exactly as far as 2**24.
    return (logits > _as_float(x)[:, None]).sum(axis=-1, dtype=jnp.float32).astype(jnp.int32)


def _weight_above(logits: Array, weights: Array, x: Array) -> Array:
    return jnp.where(logits > _as_float(x)[:, None], weights, 0.0).sum(axis=-1)


def _as_integer(x: Array) -> Array:
    """int32 of float32, in the same order."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _as_float(x: Array) -> Array:
    """The float32 whose `_as_integer` this is."""
    return jax.lax.bitcast_convert_type(jnp.where(x < 0, x ^ 0x7FFFFFFF, x), jnp.float32)
