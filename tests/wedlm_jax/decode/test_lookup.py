"""Drafts copied from texts: what is found, what is learnt, and how many are taken."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from tests.jaxpr_shapes import arrays_in
from tests.reference import lookup as reference
from wedlm_jax.decode.lookup import (
    FARTHEST,
    GAIN,
    LONGEST,
    PRIOR,
    ForwardCosts,
    find,
    gains,
    learn,
    no_lookup,
    paying_drafts,
    survival,
    worth,
)

MOST, LONGEST_TEXT = 6, 40
look = jax.jit(find, static_argnums=2)
texts = st.lists(st.integers(0, 2), min_size=1, max_size=LONGEST_TEXT)


def padded(some):
    """Texts as the state holds them; what stands behind them must not matter."""
    rows = np.random.default_rng(len(some)).integers(0, 3, (len(some), LONGEST_TEXT))
    for row, text in zip(rows, some, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows, jnp.int32), jnp.array([len(text) for text in some], jnp.int32)


@given(some=st.lists(texts, min_size=3, max_size=3))
@example(some=[[*range(12), *range(10)], [1, 8, 3, 2, 8, 4, 2, 8], [5, 6, 6]])
def test_copies_follow_the_latest_occurrence_of_the_longest_ending(some):
    found = look(*padded(some), MOST)
    for tokens, match, text in zip(found.tokens, found.match, some, strict=True):
        expected, shared = reference.find(text, MOST, LONGEST, FARTHEST)
        assert match == shared
        if shared:
            assert tokens.tolist() == expected


def test_a_text_is_searched_in_one_pass():
    """Nothing larger than a few arrays of the texts' own size exists."""
    jaxpr = jax.make_jaxpr(lambda text, length: find(text, length, 15))(
        jnp.zeros((4, 1000), jnp.int32), jnp.ones(4, jnp.int32)
    )
    assert max(np.prod(x.shape) for x in arrays_in(jaxpr.jaxpr)) <= 4 * (1000 + LONGEST)


learned = jax.jit(learn)


@given(
    copies=st.lists(st.integers(0, 1), min_size=MOST, max_size=MOST),
    committed=st.lists(st.integers(0, 1), max_size=MOST + 2),
    match=st.integers(0, FARTHEST),
)
def test_every_committed_token_says_whether_its_copy_was_right(copies, committed, match):
    before = dataclasses.replace(
        no_lookup(2, MOST),
        tokens=jnp.array([[0] * MOST, copies], jnp.int32),
        match=jnp.array([0, match], jnp.int32),
    )
    tokens = np.full((2, MOST + 2), 0)
    tokens[1, : len(committed)] = committed
    after = learned(before, jnp.array(tokens, jnp.int32), jnp.array([0, len(committed)]))
    tried, right = np.zeros(FARTHEST), np.zeros(FARTHEST)
    for length, agreed in reference.evidence(copies, match, committed, FARTHEST) if match else []:
        tried[length - 1] += 1
        right[length - 1] += agreed
    np.testing.assert_array_equal(after.tried, [np.zeros(FARTHEST), tried])
    np.testing.assert_array_equal(after.right, [np.zeros(FARTHEST), right])


def test_what_was_right_is_expected_to_be_right_and_is_forgotten_in_time():
    """A sequence is judged by its own copies, and where it has few, by those of all."""
    known = dataclasses.replace(no_lookup(3, MOST), match=jnp.array([1, 1, 0], jnp.int32))
    fresh = survival(known)
    np.testing.assert_allclose(fresh[:2], [np.cumprod(PRIOR[:MOST])] * 2, rtol=1e-5)
    assert not fresh[2].any()
    right, wrong = jnp.zeros((3, MOST), jnp.int32), jnp.ones((3, MOST), jnp.int32)
    for _ in range(60):
        known = learned(known, right, jnp.array([MOST, 0, 0]))
    own, other, _ = survival(known)
    assert own[-1] > 0.7
    assert own[0] > 0.9 > fresh[1, 0]
    assert own[0] > other[0] > fresh[1, 0]
    for _ in range(100):
        known = learned(known, wrong, jnp.array([1, 0, 0]))
    assert survival(known)[0, 0] < 0.1


# --- how many pay ------------------------------------------------------------------------

SIZES = (1, 2, 4, 8, 12)


@st.composite
def situations(draw):
    count = draw(st.integers(1, 3))
    steps = st.lists(st.just(0.0) | st.floats(0.05, 1.0), min_size=3, max_size=3)
    gains = [np.cumprod(draw(steps)).tolist() for _ in range(count)]
    rising = np.cumsum(draw(st.lists(st.floats(0.0, 3.0), min_size=5, max_size=5))) + 1
    return {
        "gains": gains,
        "tokens": draw(st.integers(count, 8)),
        "committed": draw(st.lists(st.floats(1.0, 4.0), min_size=count, max_size=count)),
        "of_size": rising.tolist(),
        "value": draw(st.lists(st.floats(0.1, 1.0), min_size=count, max_size=count)),
    }


pay = jax.jit(
    lambda gains, tokens, committed, of_size, value: paying_drafts(
        gains, tokens, committed, ForwardCosts(SIZES, of_size), value
    )
)


def seconds_of(of_size, tokens):
    whole, rest = divmod(tokens - 1, SIZES[-1])
    return whole * of_size[-1] + next(
        s for size, s in zip(SIZES, of_size, strict=True) if size >= rest + 1
    )


@given(at=situations())
def test_no_other_choice_of_drafts_decodes_faster(at):
    gains, tokens, committed, of_size, value = at.values()
    counts = pay(*map(np.array, (gains, tokens, committed, of_size, value))).tolist()
    assert all(own[count - 1] for own, count in zip(gains, counts, strict=True) if count)

    def rate(counts):
        more = [sum(own[:count]) for own, count in zip(gains, counts, strict=True)]
        return np.add(committed, more) @ value / seconds_of(of_size, tokens + sum(counts))

    best = reference.best_drafts(gains, tokens, committed, lambda t: seconds_of(of_size, t), value)
    none = rate([0] * len(gains))
    assert rate(counts) >= 0.999 * best or (sum(counts) == 0 and best <= 1.001 * GAIN * none)


def test_a_sequence_that_is_ahead_takes_drafts_only_while_others_wait_for_its_place():
    """Four sequences, of which one has five drafts of 0.5 tokens, in forwards that take 1.3 times
    as long with them."""
    costs = ForwardCosts((4, 16), jnp.array([1.0, 1.3]))
    gained = jnp.zeros((4, MOST)).at[0, :5].set(0.5)
    forwards = jnp.full(4, 40)

    def taken(output, others_wait):
        value = worth(jnp.array([output, 40, 40, 40]), forwards, jnp.array(others_wait))
        return int(paying_drafts(gained, 4, jnp.ones(4), costs, value).sum())

    assert [taken(40, False), taken(120, False), taken(120, True)] == [5, 0, 5]


@given(
    rates=st.lists(st.floats(0.05, 0.99), min_size=FARTHEST, max_size=FARTHEST),
    masks=st.just(0.0) | st.floats(0.0, 10.0),
    room=st.integers(0, MOST),
)
def test_gains_fall_and_are_what_copies_bring_together(rates, masks, room):
    """A wrong copy costs the drafts of the masks that saw it."""
    tried = jnp.full((1, FARTHEST), 1e6)
    known = dataclasses.replace(
        no_lookup(1, MOST),
        match=jnp.array([1], jnp.int32),
        tried=tried,
        right=tried * jnp.array(rates),
        masks=jnp.array([masks]),
    )
    found = np.array(gains(known, jnp.array([room]))[0], np.float64)
    right = np.cumprod([rates[min(k, FARTHEST - 1)] for k in range(MOST)])
    whole = np.cumsum(right) - masks * (1 - right)
    if masks == 0:
        np.testing.assert_allclose(found[:room], right[:room], rtol=1e-4)
    assert (np.diff(found) <= 1e-5).all()
    assert not found[room:].any()
    assert found.min() >= 0
    # No number of copies brings more than the gains of the same number say.
    assert (np.cumsum(found)[:room] >= whole[:room] - 1e-3).all()
    if not (found > 0).any():
        assert (whole[:room] <= 1e-3).all()
