"""The fill rule of mode "paper" against the Python one, and what a window commits."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.reference import sampling as reference
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.paper import filled_by
from wedlm_jax.decode.state import idle_state

SLOTS = 8


def state_of(windows):
    """Windows as lists of their active slots, true where one is filled."""
    filled = np.ones((len(windows), SLOTS), bool)  # of no meaning behind the active slots
    for row, window in zip(filled, windows, strict=True):
        row[: len(window)] = window
    return dataclasses.replace(
        idle_state(len(windows), window=SLOTS // 2, text=9, emitted=9, with_logprobs=False),
        filled=jnp.array(filled),
        active=jnp.array([len(window) for window in windows], jnp.int32),
    )


def options_of(thresholds, penalty):
    count = len(thresholds)
    return Options(
        window=jnp.full(count, SLOTS // 2),
        stop_ids=jnp.full((count, 1), -1),
        max_tokens=jnp.full(count, 9),
        entropy_threshold=jnp.array([-np.inf if t is None else t for t in thresholds]),
        position_penalty=jnp.full(count, penalty),
    )


def chosen(windows, entropies, thresholds, penalty):
    state = state_of(windows)
    tokens = jnp.zeros(entropies.shape, jnp.int32)
    fills = filled_by(state, options_of(thresholds, penalty), tokens, jnp.array(entropies))
    return [np.flatnonzero(row).tolist() for row in np.asarray(fills)]


windows = st.lists(st.booleans(), min_size=1, max_size=SLOTS)


@given(
    some=st.lists(windows, min_size=3, max_size=3),
    thresholds=st.lists(st.sampled_from([None, 0.1, 1.0, 2.0]), min_size=3, max_size=3),
    penalty=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**16),
)
def test_the_fill_rule_equals_the_python_one(some, thresholds, penalty, seed):
    entropies = np.random.default_rng(seed).uniform(0, 3, (3, SLOTS)).astype(np.float32)
    found = chosen(some, entropies, thresholds, penalty)
    for row, (window, threshold) in enumerate(zip(some, thresholds, strict=True)):
        masks = [slot for slot, filled in enumerate(window) if not filled]
        expected = []
        if masks:
            own = entropies[row, masks].tolist()
            indices, margin = reference.masks_to_fill(own, masks, threshold, penalty)
            assume(margin > 1e-5)
            expected = [masks[i] for i in indices]
        assert found[row] == expected


def fill(entropies, slots, threshold, penalty):
    """Which of the masks in ``slots`` are filled, all others being filled already."""
    window = [slot not in slots for slot in range(slots[-1] + 1)]
    array = np.full((1, SLOTS), 0.0, np.float32)
    array[0, slots] = entropies
    (found,) = chosen([window], array, [threshold], penalty)
    return [slot in found for slot in slots]


def test_the_first_mask_and_equal_entropies_and_thresholds():
    # Distances are 0, 1 and 5: only the last is lifted over the threshold.
    assert fill([0.35, 0.35, 0.35], [2, 3, 7], 0.4, 0.02) == [True, True, False]
    assert fill([0.5, 0.25, 0.5], [0, 1, 2], 0.5, 0.0) == [False, True, False]
    assert fill([0.9, 0.7, 0.7], [0, 1, 2], 0.4, 0.0) == [False, True, False]
