"""Entropy, truncation without a sort, and the draw, against NumPy and `jax.random`; random
streams that know no neighbours; greedy programs that have nothing of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import ALL_TRAITS, VOCAB, Decoding, rows_of, state_of
from tests.jaxpr_shapes import equations_in
from tests.reference import sampling as reference
from wedlm_jax.decode import sampling
from wedlm_jax.decode.options import HostOptions
from wedlm_jax.decode.sampling import Limits, choose_tokens, truncate
from wedlm_jax.params import SamplingParams

seeds = st.integers(0, 2**16)
QWEN = 151_936


# --- truncation ------------------------------------------------------------------------------

cut = jax.jit(truncate)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(50, 1.0), (0, 0.9), (50, 0.9), (1000, 0.5), (0, 0.01), (0, 1.0)]
)
def test_truncation_of_a_whole_vocabulary_equals_numpy(top_k, top_p):
    rng = np.random.default_rng(top_k)
    logits = (3 * rng.normal(size=(3, QWEN))).astype(np.float32)
    logits[1] = np.round(logits[1])  # thousands of equals
    logits[2] = jnp.array(logits[2], jnp.bfloat16).astype(np.float32)
    limits = ([limit] * 3 for limit in (top_k, top_p, 0.0))
    ours = np.isfinite(cut(logits, *map(jnp.array, limits)))
    for row, kept in zip(logits, ours, strict=True):
        order = np.argsort(-row, kind="stable")[: top_k or None]
        probability = reference.softmax(row[order].astype(np.float64))
        before = np.cumsum(probability) - probability
        expected = np.zeros(QWEN, bool)
        expected[order[before < top_p]] = True
        # Only where the sum that decides is within rounding of top-p may it be another.
        near = order[np.abs(before - top_p) < 1e-6] if top_p < 1 else []
        assert len(near) <= 2
        assert set(np.flatnonzero(kept != expected)) <= set(near)


LOGS = np.log([0.1, 0.4, 0.3, 0.2]).tolist()
HALF = -np.log(2)
INFINITE = float("inf")


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "min_p", "kept"),
    [
        # Top-k keeps exactly so many of equals, top-p the first of them.
        ([1.0, 2.0, 2.0, 2.0], 2, 1.0, 0.0, [1, 2]),
        ([0.0, -0.0, 0.0, -1.0], 2, 1.0, 0.0, [0, 1]),
        ([2.0] * 4, 0, 0.51, 0.0, [0, 1, 2]),
        ([2.0] * 4, 3, 0.7, 0.0, [0, 1, 2]),
        # What stands before a token must not reach top-p.
        ([2.0] * 4, 0, 0.5, 0.0, [0, 1]),
        ([0.0, HALF, HALF], 0, 0.5, 0.0, [0]),
        # Top-p is of what top-k left, top-k and top-p of what min-p left.
        (LOGS, 3, 0.75, 0.0, [1, 2]),
        (LOGS, 0, 0.75, 0.0, [1, 2, 3]),
        (LOGS, 2, 1.0, 0.4, [1, 2]),
        (LOGS, 0, 0.42, 0.4, [1]),
        # The most likely always stays.
        ([0.0, 3.0, 1.0], 0, 1e-6, 0.0, [1]),
        ([0.0, 3.0, 1.0], 0, 1.0, 1.0, [1]),
        ([-INFINITE, -1e30, -INFINITE], 0, 0.5, 0.5, [1]),
        # Top-p of 1 keeps even what rounding hides.
        ([0.0, -40.0, -80.0], 0, 1.0, 0.0, [0, 1, 2]),
        ([0.0, -40.0, -80.0], 2, 1.0, 0.0, [0, 1]),
    ],
)
def test_truncation_where_equals_and_rounding_decide(logits, top_k, top_p, min_p, kept):
    ours = cut(*(jnp.array([given]) for given in (logits, top_k, top_p, min_p)))
    assert np.flatnonzero(np.isfinite(ours[0])).tolist() == kept


# --- random numbers --------------------------------------------------------------------------


some_limits = st.sampled_from([None, (0, 0.7, 0.0), (3, 1.0, 0.0), (5, 0.5, 0.1)])


@given(seed=seeds, limits=some_limits)
def test_rows_one_by_one_and_at_once_draw_as_jax_random(seed, limits):
    """Of which one platform runs the first, and others the second."""
    count = 6
    rng = np.random.default_rng(seed)
    logits = jnp.array(2 * rng.normal(size=(count, VOCAB)), jnp.float32)
    keys = jax.vmap(jax.random.key)(jnp.array(rng.integers(0, 2**31, count)))
    drawn = jnp.array(rng.random(count) < 0.7)
    of_rows = None
    if limits is not None:
        of_rows = Limits(*(jnp.full(count, limit) for limit in limits))
    at_once = jax.jit(sampling.sample_at_once)(logits, keys, drawn, of_rows)
    one_by_one = jax.jit(sampling.sample_one_by_one)(logits, keys, drawn, of_rows)
    np.testing.assert_array_equal(one_by_one, at_once)
    theirs = jax.vmap(jax.random.categorical)(
        keys, logits if of_rows is None else cut(logits, *of_rows)
    )
    greedy = jnp.argmax(logits, axis=-1)
    np.testing.assert_array_equal(at_once, jnp.where(drawn, theirs, greedy))


# --- what a program has ----------------------------------------------------------------------


def primitives(traits):
    options, state = HostOptions(2, traits).options(), state_of([SOME])
    rows, _ = rows_of([SOME])
    logits = jnp.zeros((rows.slot.shape[0], VOCAB))
    traced = jax.make_jaxpr(choose_tokens)(logits, state, options, rows).jaxpr
    return {equation.primitive.name for equation in equations_in(traced)}


SOME = Decoding((3,), (), (None, None), SamplingParams(mode="paper"))
NUMBERS = ("random_bits", "random_fold_in", "threefry2x32", "shift_left", "log", "exp", "div")


def test_no_program_sorts_and_none_has_more_than_it_needs():
    everything = primitives(ALL_TRAITS)
    assert {"random_fold_in", "shift_left", "log", "div", "exp"} <= everything
    assert not everything & {"sort", "top_k", "argsort"}
    assert "exp" not in primitives(dataclasses.replace(ALL_TRAITS, truncated=False))
    greedy = primitives(dataclasses.replace(ALL_TRAITS, sampled=False, truncated=False))
    assert not greedy & {"sort", "top_k", "while", "cond", *NUMBERS}


# --- log-probabilities -------------------------------------------------------------------
