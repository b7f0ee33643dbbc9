"""Chooses a token from each row of logits, and measures how uncertain the row is.

Logits are divided by the temperature, truncated by min-p, top-k and top-p, and sampled from.
Nothing is sorted: the smallest logit that stays is found by bisection on the bits of floats, which
takes a fraction of the time of sorting 150k logits. A program without trait "sampled" contains only
an argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import DecodeState, HeadRows
from wedlm_jax.sharding import constrain

PARITY = 0x1BD11BDA
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
TINY = np.finfo(np.float32).tiny

COLDEST = 1e-6
"""Lower temperatures above 0 are raised to this, so that the divided logits stay finite."""


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
    """Returns the token chosen from each row of ``logits``, float32 ``[R, V]``; int32 ``[R]``."""
    if options.temperature is None:
        return largest(logits)
    return sample(*_sampling(logits, state, options, rows))


def choose_candidates(
    logits: Array, tokens: Array, state: DecodeState, options: Options, rows: HeadRows
) -> Array:
    """Returns a token for each row, int32 ``[R]``, chosen from a few candidates.

    Each token keeps the random number that it has in `choose_tokens`. Top-k, top-p and min-p apply
    as if there were no other tokens. ``logits``, float32 ``[R, C]``, belong to ``tokens``,
    int32 ``[R, C]``.
    """
    if options.temperature is None:
        chosen = largest(logits)
    else:
        chosen = sample_at_once(*_sampling(logits, state, options, rows), tokens)
    return jnp.take_along_axis(tokens, chosen[:, None], axis=1)[:, 0]


def _sampling(
    logits: Array, state: DecodeState, options: Options, rows: HeadRows
) -> tuple[Array, Array, Array, Limits | None]:
    """Returns the arguments of `sample` for logits ``[R, ...]``."""
    assert options.temperature is not None
    temperature = options.temperature[rows.sequence]
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, COLDEST), 1.0)
    limits = None
    if options.top_p is not None:
        assert options.top_k is not None
        assert options.min_p is not None
        limits = Limits(
            options.top_k[rows.sequence],
            options.top_p[rows.sequence],
            options.min_p[rows.sequence],
        )
    keys = random_keys(state, options, rows)
    return logits / divisor[:, None], keys, temperature > 0, limits


class Limits(NamedTuple):
    """The limits of sampling, ``[R]`` each, as in `wedlm_jax.params.SamplingParams`."""

    top_k: Array
    top_p: Array
    min_p: Array


def sample(logits: Array, keys: Array, drawn: Array, limits: Limits | None) -> Array:
    """Returns a token for each row of ``logits [R, V]``, int32 ``[R]``: where ``drawn [R]``, a
    sample of the softmax within the limits, else the most likely token."""

    # On a CPU the logits of a single row stay in the processor's cache during the search, and a
    # greedy row needs none. Elsewhere many rows at once take hardly longer than one.
    return jax.lax.platform_dependent(
        logits, keys, drawn, limits, cpu=sample_one_by_one, default=sample_at_once
    )


def sample_at_once(
    logits: Array, keys: Array, drawn: Array, limits: Limits | None, tokens: Array | None = None
) -> Array:
    """Computes `sample` for all rows together, or for logits ``[R, C]`` of some ``tokens``."""
    kept = logits if limits is None else truncate(logits, *limits)
    noise = jnp.where(drawn[:, None], gumbel(keys, logits.shape[-1], tokens), 0.0)
    # The Gumbel-max trick: the argmax of logits plus Gumbel noise is a sample of their softmax.
    return largest(kept + noise)


def sample_one_by_one(logits: Array, keys: Array, drawn: Array, limits: Limits | None) -> Array:
    """Computes `sample` for one row after another."""

    def row(given: tuple[Array, Array, Array, Limits | None]) -> Array:
        one = jax.tree.map(lambda x: x[None], given)
        return jax.lax.cond(given[2], lambda: sample_at_once(*one), lambda: largest(one[0]))[0]

    return jax.lax.map(row, (logits, keys, drawn, limits))


def largest(values: Array) -> Array:
    """Returns the argmax of ``values [R, V]``, int32 ``[R]``, the first of equal values.

    On a CPU these two passes take a quarter to an eighth of the time of `jax.numpy.argmax`.
    """
    vocab = values.shape[-1]
    place = jnp.arange(vocab, dtype=jnp.int32)
    found = jnp.where(values == values.max(axis=-1, keepdims=True), place, vocab - 1)
    return found.min(axis=-1)


def random_keys(state: DecodeState, options: Options, rows: HeadRows) -> Array:
    """Returns the key ``[R]`` of each row's random numbers.

    For an anchored sequence the key depends on the position in the completion alone. So a draft is
    sampled with the same Gumbel numbers that choose the token when the draft is verified, which
    makes agreement likely and the result exactly that of AR decoding. In mode "paper" the key
    depends on the forward and the slot.
    """
    assert options.seed is not None
    anchored = options.anchored[rows.sequence]
    index = state.first_index[rows.sequence] + rows.slot
    outer = jnp.where(anchored, index + 1, state.num_forwards[rows.sequence])
    inner = jnp.where(anchored, 0, rows.slot)
    return jax.vmap(random_key)(options.seed[rows.sequence], outer, inner)


def truncate(logits: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Returns ``logits [R, V]`` with −inf for the tokens that min-p excludes, then top-k, then
    top-p of the rest. The most likely token always stays.

    Args:
      logits: float32, already divided by the temperature.
      top_k: int32 ``[R]``, how many tokens stay, the lower ids among equal logits; 0 for all.
      top_p: float32 ``[R]`` in (0, 1]. A token stays if more likely ones sum to less than this.
      min_p: float32 ``[R]`` in [0, 1], minimum probability relative to the largest.
    """
    vocab = logits.shape[-1]
    most = logits.max(axis=-1)
    logits = jnp.where(logits >= (most + jnp.log(min_p))[:, None], logits, -jnp.inf)
    lowest, highest = _as_integer(logits.min(axis=-1)), _as_integer(most)

    # ``level`` is the k-th largest logit: the smallest x with fewer than k logits above it.
    all_stay = (top_k <= 0) | (top_k >= vocab)
    k = jnp.where(all_stay, vocab, top_k)
    highest_level = jnp.where(all_stay, lowest, highest)
    level = _first(lowest, highest_level, lambda x: _above(logits, x) < k)
    among = k - _above(logits, level)

    # Top-k keeps all logits above ``level``, and ``among`` of those equal to it. Top-p is the same
    # search with probability mass instead of counts: the smallest x with less than the required
    # mass above it, which is no lower than the level of top-k.
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
    """Returns ``logits [R, V]``, with −inf for all but those above ``level [R]`` and the first
    ``among [R]`` equal to it."""
    level = level[:, None]
    equal = logits == level
    token = jnp.arange(logits.shape[-1])

    def up_to(last: Array) -> Array:
        return (equal & (token <= last[:, None])).sum(axis=-1) >= among

    # Ties are rare unless logits are rounded; without any, there is no search for the last one that
    # stays.
    lowest = jnp.zeros_like(among)
    most = jnp.full_like(among, logits.shape[-1] - 1)
    tied = equal.sum(axis=-1) > among
    last = _first(jnp.where(tied, lowest, most), most, up_to)
    return jnp.where((logits > level) | (equal & (token <= last[:, None])), logits, -jnp.inf)


def _first(low: Array, high: Array, holds: Callable[[Array], Array]) -> Array:
    """Finds by bisection the smallest integer in ``low [R]`` .. ``high [R]`` for which ``holds`` is
    true; ``high`` if there is none. ``holds`` is false up to some integer, true from there on."""

    def step(bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # the mean rounded down, without overflow
        found = holds(middle)
        return jnp.where(found, low, middle + (low < high)), jnp.where(found, middle, high)

    def open_(bounds: tuple[Array, Array]) -> Array:
        return (bounds[0] < bounds[1]).any()

    return jax.lax.while_loop(open_, step, (low, high))[1]


def _above(logits: Array, x: Array) -> Array:
    # A CPU sums floats faster than integers, and float32 counts exactly up to 2**24.
    return (logits > _as_float(x)[:, None]).sum(axis=-1, dtype=jnp.float32).astype(jnp.int32)


def _weight_above(logits: Array, weights: Array, x: Array) -> Array:
    return jnp.where(logits > _as_float(x)[:, None], weights, 0.0).sum(axis=-1)


def _as_integer(x: Array) -> Array:
    """Maps float32 to int32 in the same order, so that bisection over integers searches floats.

    The bits of a float, read as an integer, grow with its magnitude. This is the right order for
    positive numbers and the reverse for negative ones, whose bits are therefore flipped.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _as_float(x: Array) -> Array:
    """Returns the float32 of an `_as_integer`."""
    return jax.lax.bitcast_convert_type(jnp.where(x < 0, x ^ 0x7FFFFFFF, x), jnp.float32)


# --- noise ---------------------------------------------------------------------------------


def random_key(seed: Array, *names: Array) -> Array:
    """Returns the key of a named stream: ``seed`` with each of ``names``, all scalars, folded
    in."""
    key = jax.random.key(seed, impl="threefry2x32")
    for name in names:
        key = jax.random.fold_in(key, name)
    return key


def gumbel(keys: Array, size: int, places: Array | None = None) -> Array:
    """Returns Gumbel noise, float32 ``[R, size]``: for each of ``keys [R]`` the numbers of
    ``jax.random.gumbel(key, (size,))``, or those at ``places [R, size]`` of a longer array, but
    computed many times faster on a CPU.

    On a CPU JAX computes its random bits (Threefry-2x32, Salmon et al., 2011) in rolled loops,
    whose arrays go through memory in every iteration. Unrolled, it is a single loop over the
    vocabulary.
    """
    words = jax.random.key_data(keys)
    # With this constraint each device computes the noise for its own part of the vocabulary.
    number = (
        constrain(jnp.arange(size, dtype=jnp.uint32)[None], None, "vocab")
        if places is None
        else places.astype(jnp.uint32)
    )
    bits = _threefry(words[:, :1], words[:, 1:], number)
    # 23 random bits as the fraction of a float32 in [1, 2).
    from_1 = jax.lax.bitcast_convert_type((bits >> 9) | jnp.uint32(0x3F800000), jnp.float32)
    uniform = jnp.maximum(TINY, (from_1 - 1.0) * (1.0 - TINY) + TINY)
    return -jnp.log(-jnp.log(uniform))


def _threefry(first: Array, second: Array, number: Array) -> Array:
    """Returns 32 random bits for each ``number`` from a key of two words, all uint32."""
    keys = (first, second, first ^ second ^ jnp.uint32(PARITY))
    x, y = jnp.zeros_like(number) + keys[0], number + keys[1]
    for turn in range(5):
        for rotation in ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << rotation) | (y >> (32 - rotation)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + jnp.uint32(turn + 1)
    return x ^ y
