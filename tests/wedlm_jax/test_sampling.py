"""Entropy, the fill rule and token choice against NumPy; seeds that know no neighbours."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.reference import sampling as reference
from wedlm_jax.errors import InputError
from wedlm_jax.params import (
    RowParams,
    SamplingParams,
    choose_tokens,
    entropy,
    fill_rule,
    truncate,
)

VOCAB = 7
seeds = st.integers(0, 2**16)


def row_params(rows: list[SamplingParams]) -> RowParams:
    def column(name: str, dtype: type) -> jax.Array:
        return jnp.array([getattr(row, name) for row in rows], dtype)

    return RowParams(
        window=jnp.full(len(rows), 4),
        temperature=column("temperature", jnp.float32),
        top_p=column("top_p", jnp.float32),
        top_k=column("top_k", jnp.int32),
        max_tokens=column("max_tokens", jnp.int32),
        entropy_threshold=column("entropy_threshold", jnp.float32),
        position_penalty=column("position_penalty", jnp.float32),
        seed=column("seed", jnp.uint32),
        stop_ids=jnp.full((len(rows), 1), -1),
    )


choose = jax.jit(choose_tokens)


@given(seed=seeds, scale=st.sampled_from([0.1, 3.0, 30.0]), removed=st.integers(0, VOCAB - 1))
def test_entropy_equals_numpy(seed: int, scale: float, removed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(5, VOCAB)).astype(np.float32) * scale
    logits[:, :removed] = -np.inf
    expected = [reference.entropy(row) for row in logits]
    np.testing.assert_allclose(entropy(jnp.array(logits)), expected, rtol=1e-5, atol=1e-6)


def test_entropy_of_certainty_and_of_ignorance() -> None:
    one_left = jnp.array([5.0, -jnp.inf, -jnp.inf])
    assert float(entropy(one_left)) == 0
    assert float(entropy(jnp.full(VOCAB, 2.5))) == pytest.approx(np.log(VOCAB), rel=1e-6)


@given(data=st.data(), seed=seeds)
def test_fill_rule_equals_the_python_one(data: st.DataObject, seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, window = 3, 6
    entropies = rng.uniform(0, 3, (batch, window)).astype(np.float32)
    slots = np.sort(np.stack([rng.permutation(12)[:window] for _ in range(batch)]), axis=1)
    counts = data.draw(st.lists(st.integers(0, window), min_size=batch, max_size=batch))
    thresholds = data.draw(
        st.lists(st.sampled_from([None, 0.1, 1.0, 2.0]), min_size=batch, max_size=batch)
    )
    penalty = data.draw(st.sampled_from([0.0, 0.05, 0.5]))
    chosen = fill_rule(
        jnp.array(entropies),
        jnp.array(slots),
        jnp.arange(window) < jnp.array(counts)[:, None],
        jnp.array([-np.inf if t is None else t for t in thresholds], jnp.float32),
        jnp.full(batch, penalty, jnp.float32),
    )
    for row, count in enumerate(counts):
        expected: list[int] = []
        if count:
            expected, margin = reference.masks_to_fill(
                entropies[row, :count].tolist(), slots[row, :count].tolist(),
                thresholds[row], penalty,
            )  # fmt: skip
            assume(margin > 1e-5)
        assert np.flatnonzero(chosen[row]).tolist() == expected


def fill(entropies: list[float], slots: list[int], threshold: float, penalty: float) -> list[bool]:
    chosen = fill_rule(
        jnp.array([entropies]), jnp.array([slots]), jnp.ones((1, len(slots)), bool),
        jnp.array([threshold]), jnp.array([penalty]),
    )  # fmt: skip
    return chosen[0].tolist()


def test_the_penalty_counts_from_the_first_mask_in_slots() -> None:
    # Distances are 0, 1 and 5: only the last is lifted over the threshold.
    assert fill([0.3, 0.3, 0.3], [4, 5, 9], 0.4, 0.02) == [True, True, False]


def test_the_threshold_itself_is_not_below_it() -> None:
    assert fill([0.5, 0.25, 0.5], [0, 1, 2], 0.5, 0.0) == [False, True, False]


def test_where_none_is_below_the_earliest_of_the_smallest_is_filled() -> None:
    assert fill([0.9, 0.7, 0.7], [0, 1, 2], 0.4, 0.0) == [False, True, False]
    assert fill([0.9, 0.7, 0.7], [0, 1, 2], -jnp.inf, 0.5) == [True, False, False]


@given(
    seed=seeds,
    top_k=st.integers(0, VOCAB + 2),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 1.0]),
)
def test_truncation_equals_numpy(seed: int, top_k: int, top_p: float) -> None:
    logits = (2 * np.random.default_rng(seed).normal(size=(4, VOCAB))).astype(np.float32)
    ours = truncate(jnp.array(logits), jnp.int32(top_k), jnp.float32(top_p))
    for row, kept in zip(logits, ours, strict=True):
        expected, margin = reference.truncate(row, top_k, top_p)
        assume(margin > 1e-5)
        np.testing.assert_array_equal(kept, expected.astype(np.float32))


def kept(logits: list[float], top_k: int, top_p: float) -> list[int]:
    return np.flatnonzero(
        jnp.isfinite(truncate(jnp.array(logits), jnp.int32(top_k), jnp.float32(top_p)))
    ).tolist()


def test_top_k_keeps_exactly_so_many_of_equals() -> None:
    assert kept([1.0, 2.0, 2.0, 2.0], 2, 1.0) == [1, 2]


def test_top_p_is_of_what_top_k_left() -> None:
    # Of all, 1 and 2 hold 0.4 + 0.3 < 0.8; of the three that top-k leaves, 0.4 / 0.9 +
    # 0.3 / 0.9 reach 0.7, so that 3 falls away at 0.75 and stays at 0.8.
    logits = np.log([0.1, 0.4, 0.3, 0.2]).tolist()
    assert kept(logits, 3, 0.75) == [1, 2]
    assert kept(logits, 3, 0.8) == [1, 2, 3]
    assert kept(logits, 0, 0.75) == [1, 2, 3]


def test_a_tiny_top_p_keeps_the_first() -> None:
    assert kept([0.0, 3.0, 1.0], 0, 1e-6) == [1]


@given(seed=seeds, data=st.data())
def test_tokens_equal_the_reference(seed: int, data: st.DataObject) -> None:
    batch, window = 3, 4
    logits = (2 * np.random.default_rng(seed).normal(size=(batch, window, VOCAB))).astype("f4")
    logits[..., VOCAB - 1] = -np.inf
    rows = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 0.5, 1.0, 2.0])),
            top_k=data.draw(st.integers(0, VOCAB)),
            top_p=data.draw(st.sampled_from([0.2, 0.7, 1.0])),
            seed=data.draw(st.integers(0, 2**32 - 1)),
        )
        for _ in range(batch)
    ]
    slots = np.tile(np.arange(window) * 2, (batch, 1))
    forwards = np.array([1, 5, 900])
    streams = jnp.array(slots), jnp.broadcast_to(jnp.array(forwards)[:, None], slots.shape)
    ours = choose(jnp.array(logits), *streams, row_params(rows))
    for i, row in enumerate(rows):
        for j in range(window):
            token, margin = reference.choose_token(
                logits[i, j], row, int(forwards[i]), int(slots[i, j])
            )
            assume(margin > 1e-5)
            assert ours[i, j] == token


def draws(rows: list[SamplingParams], forward: int = 1, slots: int = 4) -> np.ndarray:
    """int ``[B, slots]`` from the same logits everywhere."""
    logits = jnp.broadcast_to(jnp.linspace(0, 1, VOCAB), (len(rows), slots, VOCAB))
    places = jnp.broadcast_to(jnp.arange(slots), (len(rows), slots))
    return np.asarray(choose(logits, places, jnp.full_like(places, forward), row_params(rows)))


def test_frequencies_are_those_of_the_softmax_at_the_temperature() -> None:
    count, temperature = 4000, 0.5
    tokens = draws([SamplingParams(temperature=temperature, seed=3)], slots=count)[0]
    expected = reference.softmax(np.linspace(0, 1, VOCAB) / temperature)
    found = np.bincount(tokens, minlength=VOCAB) / count
    # Five standard deviations of a binomial share.
    assert (np.abs(found - expected) < 5 * np.sqrt(expected * (1 - expected) / count)).all()


def test_a_seed_draws_the_same_beside_any_neighbours() -> None:
    def hot(seed: int, temperature: float = 1.0) -> SamplingParams:
        return SamplingParams(temperature=temperature, seed=seed)

    here = draws([hot(1), hot(2), hot(3)])
    there = draws([hot(7), hot(8, 0.0), hot(1)])
    np.testing.assert_array_equal(here[0], there[2])
    assert (there[1] == VOCAB - 1).all()  # a greedy row beside sampled ones stays greedy


def test_seeds_forwards_and_slots_draw_apart() -> None:
    wide = 64
    one = draws([SamplingParams(temperature=1.0, seed=1)] * 2, slots=wide)
    np.testing.assert_array_equal(one[0], one[1])
    seed = draws([SamplingParams(temperature=1.0, seed=2)] * 2, slots=wide)
    forward = draws([SamplingParams(temperature=1.0, seed=1)] * 2, forward=2, slots=wide)
    # Seven tokens agree by chance one time in six; two thirds of 64 never.
    for other in (seed[0], forward[0], np.roll(one[0], 1)):
        assert (one[0] == other).mean() < 0.5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "1"),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 2.0),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("position_penalty", -1),
        ("entropy_threshold", -0.5),
        ("entropy_threshold", float("nan")),
        ("seed", 2**32),
        ("seed", -1),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", ("a",)),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{field}: expected"):
        SamplingParams(**{field: value})


def test_one_stop_text_and_lists_are_taken_too() -> None:
    loose: dict[str, Any] = {"stop": "ab", "stop_token_ids": [3]}
    params = SamplingParams(**loose)
    assert (params.stop, params.stop_token_ids) == (("ab",), (3,))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0),
        ("n", 1.5),
        ("n", 2),
        ("min_tokens", -1),
        ("min_tokens", 257),
        ("repetition_penalty", 0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("logit_bias", [3]),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: "1"}),
        ("logit_bias", {3: float("nan")}),
        ("bad_words", ("",)),
        ("bad_words", (" ",)),
        ("bad_words", ((),)),
        ("bad_words", ((3, -1),)),
        ("bad_words", (3,)),
        ("bad_words", 3),
        ("logprobs", -1),
        ("logprobs", 21),
        ("logprobs", True),
    ],
)
def test_a_bad_option_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"^{field}: expected"):
        SamplingParams(**{field: value})


def test_options_as_json_has_them_are_taken_too() -> None:
    loose: dict[str, Any] = {"logit_bias": {"3": 1, 4: -2.5}, "bad_words": ["ab", [3, 4]]}
    params = SamplingParams(**loose)
    assert params.logit_bias == {3: 1, 4: -2.5}
    assert params.bad_words == ("ab", (3, 4))
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)  # type: ignore[arg-type]
    empty: dict[str, Any] = {"logit_bias": None, "bad_words": None}
    assert SamplingParams(**empty) == SamplingParams()
    assert hash(params) == hash(SamplingParams(**loose))


def test_equal_samples_are_refused() -> None:
    with pytest.raises(InputError, match=r"^n: expected 1 at temperature 0, where all samples"):
        SamplingParams(n=2)
    assert SamplingParams(n=2, temperature=0.7).n == 2
