"""Entropy, truncation without a sort, and the draw, against NumPy and `jax.random`; random
streams that know no neighbours; greedy programs that have nothing of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples.windows import (
    ALL_TRAITS,
    VOCAB,
    WINDOW,
    Decoding,
    options_of,
    rows_of,
    sequences,
    state_of,
)
from tests.jaxpr_shapes import equations_in
from tests.reference import sampling as reference
from wedlm_jax.decode import sampling
from wedlm_jax.decode.options import idle_options
from wedlm_jax.decode.sampling import (
    Limits,
    choose_tokens,
    entropy,
    gumbel,
    largest,
    random_key,
    truncate,
)
from wedlm_jax.params import SamplingParams

seeds = st.integers(0, 2**16)
QWEN = 151_936


# --- entropy and argmax ----------------------------------------------------------------------


@given(seed=seeds, scale=st.sampled_from([0.1, 3.0, 30.0]), removed=st.integers(0, VOCAB - 1))
def test_entropy_equals_numpy(seed, scale, removed):
    logits = np.random.default_rng(seed).normal(size=(5, VOCAB)).astype(np.float32) * scale
    logits[:, :removed] = -np.inf
    expected = [reference.entropy(row) for row in logits]
    np.testing.assert_allclose(entropy(jnp.array(logits)), expected, rtol=1e-5, atol=1e-6)


def test_entropy_of_certainty_and_of_ignorance():
    one_left = jnp.array([5.0, -jnp.inf, -jnp.inf])
    assert float(entropy(one_left)) == 0
    assert float(entropy(jnp.full(VOCAB, 2.5))) == pytest.approx(np.log(VOCAB), rel=1e-6)


@given(seed=seeds, levels=st.integers(1, 9))
def test_the_first_of_the_largest_is_found(seed, levels):
    values = np.random.default_rng(seed).integers(0, levels, (6, VOCAB)).astype(np.float32)
    values[values == 0] = -np.inf
    np.testing.assert_array_equal(largest(jnp.array(values)), values.argmax(axis=1))


# --- truncation ------------------------------------------------------------------------------

cut = jax.jit(truncate)


def truncated(logits, *limits):
    top_k, top_p, min_p = limits
    return np.asarray(
        cut(
            jnp.array(logits),
            jnp.array(top_k, jnp.int32),
            jnp.array(top_p, jnp.float32),
            jnp.array(min_p, jnp.float32),
        )
    )


@given(
    seed=seeds,
    levels=st.sampled_from([None, 2, 5]),
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.4, 1.0]),
)
def test_truncation_equals_numpy(seed, levels, top_k, top_p, min_p):
    """With ``levels``, most logits have equals."""
    rng = np.random.default_rng(seed)
    logits = (2 * rng.normal(size=(4, VOCAB))).astype(np.float32)
    if levels is not None:
        logits = rng.integers(-levels, 2, (4, VOCAB)).astype(np.float32)
    logits[:, rng.integers(VOCAB)] = -np.inf
    ours = truncated(logits, [top_k] * 4, [top_p] * 4, [min_p] * 4)
    compared = 0
    for row, kept in zip(logits, ours, strict=True):
        expected, margin = reference.truncate(row, top_k, top_p, min_p)
        # Equal logits are no question of rounding: lower ids stay.
        if margin > 1e-5 or (top_p == 1 and min_p == 0):
            compared += 1
            np.testing.assert_array_equal(kept, expected.astype(np.float32))
    assume(compared)


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(50, 1.0), (0, 0.9), (50, 0.9), (1000, 0.5), (0, 0.01), (0, 1.0)]
)
def test_truncation_of_a_whole_vocabulary_equals_numpy(top_k, top_p):
    rng = np.random.default_rng(top_k)
    logits = (3 * rng.normal(size=(3, QWEN))).astype(np.float32)
    logits[1] = np.round(logits[1])  # thousands of equals
    logits[2] = jnp.array(logits[2], jnp.bfloat16).astype(np.float32)
    ours = np.isfinite(truncated(logits, [top_k] * 3, [top_p] * 3, [0] * 3))
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


def test_every_row_has_limits_of_its_own():
    logits = np.tile(np.array([0.0, 1.0, 2.0, 3.0], np.float32), (4, 1))
    kept = truncated(logits, [0, 1, 0, 0], [1, 1, 0.5, 1], [0, 0, 0, 0.3])
    assert np.isfinite(kept).sum(axis=1).tolist() == [4, 1, 1, 2]


def kept(logits, top_k, top_p, min_p=0.0):
    ours = truncated(np.array([logits], np.float32), [top_k], [top_p], [min_p])
    return np.flatnonzero(np.isfinite(ours[0])).tolist()


def test_top_k_keeps_exactly_so_many_of_equals():
    assert kept([1.0, 2.0, 2.0, 2.0], 2, 1.0) == [1, 2]
    assert kept([0.0, -0.0, 0.0, -1.0], 2, 1.0) == [0, 1]


def test_top_p_keeps_the_first_of_equals():
    assert kept([2.0] * 4, 0, 0.5) == [0, 1]
    assert kept([2.0] * 4, 0, 0.51) == [0, 1, 2]
    assert kept([2.0] * 4, 3, 0.7) == [0, 1, 2]


def test_what_stands_before_a_token_must_not_reach_top_p():
    half = -np.log(2)
    assert kept([0.0, half, half], 0, 0.5) == [0]
    assert kept([0.0, half, half], 0, 0.501) == [0, 1]


def test_top_p_is_of_what_top_k_left():
    # Of all, 1 and 2 hold 0.4 + 0.3 < 0.8; of the three that top-k leaves, 0.4 / 0.9 +
    # 0.3 / 0.9 reach 0.7, so that 3 falls away at 0.75 and stays at 0.8.
    logits = np.log([0.1, 0.4, 0.3, 0.2]).tolist()
    assert kept(logits, 3, 0.75) == [1, 2]
    assert kept(logits, 3, 0.8) == [1, 2, 3]
    assert kept(logits, 0, 0.75) == [1, 2, 3]


def test_top_k_is_of_what_min_p_left():
    logits = np.log([0.1, 0.4, 0.3, 0.2]).tolist()
    assert kept(logits, 0, 1.0, 0.4) == [1, 2, 3]
    assert kept(logits, 2, 1.0, 0.4) == [1, 2]
    # Of what is left 1 holds 0.4 / 0.9; of all it would hold less than 0.42.
    assert kept(logits, 0, 0.42, 0.4) == [1]


def test_the_most_likely_always_stays():
    assert kept([0.0, 3.0, 1.0], 0, 1e-6) == [1]
    assert kept([0.0, 3.0, 1.0], 0, 1.0, 1.0) == [1]
    assert kept([-np.inf, -1e30, -np.inf], 0, 0.5, 0.5) == [1]


def test_top_p_of_1_keeps_even_what_rounding_hides():
    assert kept([0.0, -40.0, -80.0], 0, 1.0) == [0, 1, 2]
    assert kept([0.0, -40.0, -80.0], 2, 1.0) == [0, 1]


# --- random numbers --------------------------------------------------------------------------


SIZE = 1000
our_noise = jax.jit(lambda keys: gumbel(keys, SIZE))
their_noise = jax.jit(lambda key: jax.random.gumbel(key, (SIZE,)))


@given(seed=st.integers(0, 2**32 - 1), first=st.integers(-1, 2**31 - 1), second=seeds)
def test_noise_and_keys_are_those_of_jax_random(seed, first, second):
    names = jnp.uint32(seed), jnp.int32(first), jnp.int32(second)
    key = jax.random.key(jnp.uint32(seed))
    for name in names[1:]:
        key = jax.random.fold_in(key, name)
    ours = random_key(*names)
    np.testing.assert_array_equal(jax.random.key_data(ours), jax.random.key_data(key))
    np.testing.assert_array_equal(our_noise(ours[None])[0], their_noise(key))


some_limits = st.sampled_from([None, (0, 0.7, 0.0), (3, 1.0, 0.0), (5, 0.5, 0.1)])


@given(seed=seeds, limits=some_limits)
def test_rows_one_by_one_and_at_once_draw_the_same(seed, limits):
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
    if of_rows is None:
        theirs = jax.vmap(jax.random.categorical)(keys, logits)
        greedy = jnp.argmax(logits, axis=-1)
        np.testing.assert_array_equal(at_once, jnp.where(drawn, theirs, greedy))


# --- tokens ----------------------------------------------------------------------------------

choose = jax.jit(choose_tokens)
LARGEST_ROWS = 40


def chosen(some, logits):
    _, named = rows_of(some, padding=0)
    rows, _ = rows_of(some, padding=len(logits) - len(named))
    return np.asarray(choose(jnp.array(logits), state_of(some), options_of(some), rows)), named


@given(some=st.lists(sequences(), min_size=3, max_size=3), seed=seeds)
def test_tokens_equal_the_reference(some, seed):
    logits = (2 * np.random.default_rng(seed).normal(size=(LARGEST_ROWS, VOCAB))).astype("f4")
    logits[:, VOCAB - 1] = -np.inf
    ours, named = chosen(some, logits)
    compared = 0
    for row, (i, slot, _) in enumerate(named):
        one = some[i]
        # The stream is named by the place in the completion, or by forward and slot.
        stream = (one.place(slot) + 1, 0) if one.anchored else (one.num_forwards, slot)
        token, margin = reference.choose_token(logits[row], one.params, *stream)
        if margin > 1e-5:
            compared += 1
            assert ours[row] == token
    assume(compared)


def test_a_draft_is_drawn_with_the_numbers_that_verify_it():
    params = SamplingParams(mode="verified", temperature=1.0, seed=5)
    logits = np.tile(np.linspace(0, 1, VOCAB, dtype=np.float32), (LARGEST_ROWS, 1))
    drafting = Decoding((3,), (4, 5), (5, None, None, None), params)
    # The same places later, all drafted, one token further on and after more forwards.
    checking = Decoding((3,), (4, 5, 6), (6, 7, 8, None), params, num_forwards=7)

    def by_place(one):
        ours, named = chosen([one], logits)
        return {one.place(slot): int(ours[row]) for row, (_, slot, _) in enumerate(named)}

    first, second = by_place(drafting), by_place(checking)
    shared = first.keys() & second.keys()
    assert len(shared) == 2
    assert all(first[place] == second[place] for place in shared)


COUNT = 64


def draws(params, others, forward=1):
    """int ``[COUNT]``, tokens of a sequence beside the others, from the same logits everywhere."""
    some = [Decoding((3,), (), (None,) * (2 * WINDOW), p, forward) for p in (params, *others)]
    logits = np.tile(np.linspace(0, 1, VOCAB, dtype=np.float32), (LARGEST_ROWS, 1))
    return np.concatenate(
        [
            chosen([dataclasses.replace(one, num_forwards=forward + i) for one in some], logits)[0][
                : 2 * WINDOW
            ]
            for i in range(0, 10 * COUNT // (2 * WINDOW), 10)
        ]
    )


def hot(seed):
    return SamplingParams(mode="paper", temperature=1.0, seed=seed)


def test_a_seed_draws_the_same_beside_any_neighbours():
    alone = draws(hot(1), [])
    cold = dataclasses.replace(hot(3), temperature=0.0)
    narrow = dataclasses.replace(hot(4), top_k=2)
    for others in ([hot(2), cold, narrow], [cold], [hot(1)]):
        np.testing.assert_array_equal(alone, draws(hot(1), others))
    assert (draws(cold, [hot(1)]) == VOCAB - 1).all()


def test_seeds_forwards_and_slots_draw_apart():
    one = draws(hot(1), [])
    # Twelve tokens agree by chance about one time in eleven; half of 64 never.
    for other in (draws(hot(2), []), draws(hot(1), [], forward=2), np.roll(one, 1)):
        assert (one == other).mean() < 0.5


@pytest.mark.parametrize("limits", [None, (0, 0.8, 0.0)])
def test_frequencies_are_those_of_the_softmax(limits):
    count = 20_000
    logits = np.linspace(0, 2, VOCAB, dtype=np.float32)
    keys = jax.vmap(jax.random.key)(jnp.arange(count))
    of_rows = None
    expected = reference.softmax(logits)
    if limits is not None:
        of_rows = Limits(*(jnp.full(count, limit) for limit in limits))
        expected = reference.softmax(reference.truncate(logits, *limits)[0])
    everywhere = jnp.ones(count, bool)
    tokens = jax.jit(sampling.sample)(
        jnp.broadcast_to(logits, (count, VOCAB)), keys, everywhere, of_rows
    )
    found = np.bincount(np.asarray(tokens), minlength=VOCAB) / count
    # Five standard deviations of a binomial share.
    assert (np.abs(found - expected) <= 5 * np.sqrt(expected * (1 - expected) / count)).all()


# --- what a program has ----------------------------------------------------------------------


def primitives(traits):
    options, state = idle_options(2, traits), state_of([SOME])
    rows, _ = rows_of([SOME])
    logits = jnp.zeros((rows.slot.shape[0], VOCAB))
    traced = jax.make_jaxpr(choose_tokens)(logits, state, options, rows).jaxpr
    return {equation.primitive.name for equation in equations_in(traced)}


SOME = Decoding((3,), (), (None, None), SamplingParams(mode="paper"))
NUMBERS = ("random_bits", "random_fold_in", "threefry2x32", "shift_left", "log", "exp", "div")


def test_a_greedy_program_has_nothing_of_sampling():
    greedy = dataclasses.replace(ALL_TRAITS, sampled=False, truncated=False)
    found = primitives(greedy)
    assert not found & {"sort", "top_k", "while", "cond", *NUMBERS}
    # That these names are right: a program that draws has them.
    assert {"random_fold_in", "shift_left", "log", "div"} <= primitives(ALL_TRAITS)


def test_only_a_truncated_program_looks_for_limits():
    assert "exp" not in primitives(dataclasses.replace(ALL_TRAITS, truncated=False))
    assert "exp" in primitives(ALL_TRAITS)


def test_no_program_sorts():
    assert not primitives(ALL_TRAITS) & {"sort", "top_k", "argsort"}
