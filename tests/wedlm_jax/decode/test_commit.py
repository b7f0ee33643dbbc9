"""Texts that grow by what is committed, and windows that are given other widths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from wedlm_jax.decode.loop import append, with_windows
from wedlm_jax.decode.options import Options
from wedlm_jax.decode.state import idle_state, num_slots

WIDEST = 4
SLOTS = num_slots(WIDEST)
TEXT = (5, 6, 7, 8)


def state_of(windows, *, anchored):
    """Sequences with this text, each with a window; that of an anchored one begins with the text's
    last token."""
    count = len(windows)
    filled, tokens = np.ones((count, SLOTS), bool), np.full((count, SLOTS), 9)
    for i, window in enumerate(windows):
        filled[i, : len(window)] = [token is not None for token in window]
        tokens[i, : len(window)] = [9 if token is None else token for token in window]
    computed = jnp.array([len(TEXT) - one for one in anchored], jnp.int32)
    empty = idle_state(count, window=WIDEST, text=12, emitted=6, with_logprobs=False)
    return dataclasses.replace(
        empty,
        text=empty.text.at[:, : len(TEXT)].set(jnp.array(TEXT)),
        text_length=jnp.full(count, len(TEXT)),
        prompt_length=jnp.full(count, 2),
        prefill_length=computed - 1,
        num_computed=computed,
        tokens=jnp.array(tokens, jnp.int32),
        filled=jnp.array(filled),
        active=jnp.array([len(window) for window in windows], jnp.int32),
        running=jnp.ones(count, bool),
    )


def options_of(windows, verified, max_tokens=9):
    return Options(
        window=jnp.array(windows, jnp.int32),
        stop_ids=jnp.array([[1, -1]] * len(windows)),
        max_tokens=jnp.full(len(windows), max_tokens),
        verified=jnp.array(verified),
    )


def views(state):
    return [
        [int(state.tokens[i, s]) if state.filled[i, s] else None for s in range(state.active[i])]
        for i in range(len(state.active))
    ]


narrow = jax.jit(with_windows)


@given(drafts=st.integers(0, WIDEST - 1), window=st.integers(0, WIDEST))
def test_a_verified_window_keeps_masks_behind_its_drafts(drafts, window):
    """So that the token behind the last draft has its row: `verify` takes it if all are right."""
    before = [8, *range(10, 10 + drafts), *[None] * WIDEST]
    state = state_of([before], anchored=[True])
    after = narrow(state, options_of([window], [True]), jnp.array([True]))
    (view,) = views(after)
    assert view[0] == TEXT[-1]
    run = view.index(None) if None in view else len(view)
    assert view == before[:run] + [None] * window
    assert run == min(1 + drafts, max(window, 1))
    assert int(after.num_computed[0]) == len(TEXT) - 1


def test_a_paper_window_forgets_what_does_not_fit():
    before = [10, None, 12, None, None]
    state = state_of([before] * 4, anchored=[False] * 4)
    options = options_of([1, 2, 0, 1], [False] * 4)
    after = narrow(state, options, jnp.array([True, True, True, False]))
    assert views(after) == [
        [10, None],
        [10, None, 12],
        [TEXT[-1]],  # token by token: the last token of the text is computed again
        before,
    ]
    assert after.num_computed.tolist() == [4, 4, 3, 4]


@given(
    new=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    count=st.integers(0, 5),
    room=st.integers(1, 5),
)
def test_a_text_grows_to_its_first_stop_or_its_length(new, count, room):
    """Token 1 is a stop."""
    state = state_of([[None]], anchored=[False])
    options, nothing = options_of([1], [False], max_tokens=2 + room), jnp.array([0])
    after = append(state, options, jnp.array([new]), None, jnp.array([count]), nothing)
    expected = new[: min(count, room)]
    stopped = 1 in expected
    if stopped:
        expected = expected[: expected.index(1) + 1]
    length = len(TEXT) + len(expected)
    assert after.text[0, :length].tolist() == [*TEXT, *expected]
    assert int(after.text_length[0]) == length
    assert after.emitted.tokens[0, : len(expected)].tolist() == expected
    assert int(after.emitted.count[0]) == len(expected)
    assert bool(after.stopped[0]) == stopped
    assert bool(after.running[0]) == (not stopped and len(expected) < room)
