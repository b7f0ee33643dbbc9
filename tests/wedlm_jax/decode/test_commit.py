"""Which masks a forward fills where rounding could decide, and windows that get narrower."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.windows import SLOTS, WINDOW, Decoding, options_of, state_of
from wedlm_jax.decode.loop import with_windows
from wedlm_jax.decode.paper import filled_by
from wedlm_jax.params import SamplingParams

narrow = jax.jit(with_windows)


def narrowed(mode, before, window):
    """The window ``before`` of a sequence after it gets this width, and its ``num_computed``."""
    one = Decoding((5, 6), (7, 8), tuple(before), SamplingParams(mode=mode))
    # The same beside it keeps its window.
    after = narrow(state_of([one, one]), options_of([one, one], window=window), CHANGED)
    views = [
        [int(t) if there else None for t, there in zip(tokens[:count], filled, strict=False)]
        for tokens, filled, count in zip(after.tokens, after.filled, after.active, strict=True)
    ]
    assert views[1] == before
    return views[0], int(after.num_computed[0])


CHANGED = jnp.array([True, False, False])


@given(drafts=st.integers(0, WINDOW - 1), window=st.integers(0, WINDOW))
def test_a_verified_window_keeps_masks_behind_its_drafts(drafts, window):
    """So that the token behind the last draft has its row: `verify` takes it if all are right."""
    before = [8, *range(9, 9 + drafts), *[None] * WINDOW]
    view, computed = narrowed("verified", before, window)
    run = view.index(None) if None in view else len(view)
    assert view == before[:run] + [None] * window
    assert run == min(1 + drafts, max(window, 1))
    assert computed == 3


def test_a_paper_window_forgets_what_does_not_fit():
    before = [9, None, 10, None, None]
    assert narrowed("paper", before, 1) == ([9, None], 4)
    assert narrowed("paper", before, 2) == ([9, None, 10], 4)
    # Token by token: the last token of the text is computed again.
    assert narrowed("paper", before, 0) == ([8], 3)


@pytest.mark.parametrize(
    ("entropies", "slots", "threshold", "penalty", "filled"),
    [
        # Distances are 0, 1 and 5: only the last is lifted over the threshold.
        ([0.35, 0.35, 0.35], [2, 3, 7], 0.4, 0.02, [2, 3]),
        ([0.5, 0.25, 0.5], [0, 1, 2], 0.5, 0.0, [1]),
        ([0.9, 0.7, 0.7], [0, 1, 2], 0.4, 0.0, [1]),
    ],
)
def test_masks_with_equal_entropies_or_at_the_threshold(
    entropies, slots, threshold, penalty, filled
):
    """The fill rule where rounding could decide; all slots but these are filled already."""
    window = tuple(None if slot in slots else 3 for slot in range(slots[-1] + 1))
    params = SamplingParams(entropy_threshold=threshold, position_penalty=penalty, mode="paper")
    one = Decoding((5,), (), window, params)
    of_slots = np.zeros((2, SLOTS), np.float32)
    of_slots[0, slots] = entropies
    options = dataclasses.replace(options_of([one]), bad_words=None)
    found = filled_by(state_of([one]), options, jnp.zeros((2, SLOTS), jnp.int32), of_slots)
    assert np.flatnonzero(found[0]).tolist() == filled
