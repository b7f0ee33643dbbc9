"""What is seen of sequences between two looks, and the forwards a burst was made of."""

from __future__ import annotations

import numpy as np
import pytest

from wedlm_jax.engine.burst import Report, Request
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.sequence_slots import Progress, SequenceSlots, stretches
from wedlm_jax.params import SamplingParams


def sequence(index: int, mode: str = "verified") -> SequenceState:
    params = SamplingParams(max_tokens=100, mode=mode)
    state = SequenceState(Request(index, [1, 2, 3], params), index)
    state.index = index
    return state


def ran(state: SequenceState, tokens: int, forwards: int, slots: int) -> None:
    state.text.extend([1] * tokens)
    state.num_forwards += forwards
    state.num_token_instances += slots
    state.num_computed += tokens


def with_window(slots: SequenceSlots, state: SequenceState, window: int, column: int) -> None:
    rows = np.array([state.index])
    slots.set_windows(rows, np.array([column]), np.array([window]), np.array([1.0]))


def test_the_forward_that_opens_a_window_is_left_out() -> None:
    slots = SequenceSlots(2)
    verified, paper = sequence(0), sequence(1, "paper")
    for one in (verified, paper):
        slots.enter(one, 0, free=True)
        with_window(slots, one, 8, 3)
    ran(verified, 1 + 12, 1 + 2, 9 + 30)
    ran(paper, 0 + 12, 1 + 2, 8 + 30)
    seen = slots.evidence()
    assert seen.tokens.tolist() == [12, 12]
    assert seen.forwards.tolist() == [2, 2]
    assert seen.slots.tolist() == [30, 30]
    ran(verified, 6, 1, 15)
    again = slots.evidence()
    assert (again.index.tolist(), again.tokens.tolist(), again.forwards.tolist()) == ([0], [6], [1])
    assert not slots.evidence().index.size


def test_so_is_the_first_forward_of_a_wider_window_but_not_of_a_narrower_one() -> None:
    slots, one = SequenceSlots(1), sequence(0)
    slots.enter(one, 0, free=True)
    with_window(slots, one, 8, 3)
    ran(one, 5, 2, 20)
    slots.evidence()
    rows = np.array([0])
    slots.set_windows(rows, np.array([4]), np.array([16]), np.array([4.0]))
    ran(one, 4 + 10, 2, 16 + 4 + 27)
    wider = slots.evidence()
    assert (wider.tokens.tolist(), wider.forwards.tolist(), wider.slots.tolist()) == (
        [10], [1], [27],
    )  # fmt: skip
    slots.set_windows(rows, np.array([3]), np.array([8]), np.array([9.0]))
    ran(one, 10, 2, 30)
    assert slots.evidence().forwards.tolist() == [2]


def test_autoregressive_forwards_say_nothing_of_windows() -> None:
    slots, one = SequenceSlots(1), sequence(0)
    slots.enter(one, 0, free=True)
    with_window(slots, one, 0, 0)
    ran(one, 10, 9, 9)
    assert not slots.evidence().index.size
    with_window(slots, one, 4, 2)
    ran(one, 1 + 6, 1 + 2, 5 + 14)
    assert slots.evidence().tokens.tolist() == [6]


def test_sequences_that_are_gone_are_evidence_once() -> None:
    slots, first, second = SequenceSlots(1), sequence(0), sequence(0)
    slots.enter(first, 0, free=True)
    with_window(slots, first, 8, 3)
    ran(first, 13, 3, 39)
    first.index = -1
    assert not slots.holds(second)
    slots.enter(second, 1, free=True)
    with_window(slots, second, 4, 2)
    ran(second, 7, 3, 19)
    seen = slots.evidence()
    assert seen.index.tolist() == [0, -1]
    assert seen.kind.tolist() == [1, 0]
    assert seen.tokens.tolist() == [6, 12]
    second.index = -1
    ran(second, 3, 1, 7)
    assert slots.evidence().tokens.tolist() == [3]
    assert not slots.evidence().index.size


def test_places_are_added_and_nothing_is_lost() -> None:
    slots, one = SequenceSlots(1), sequence(0)
    slots.enter(one, 0, free=True)
    with_window(slots, one, 8, 3)
    slots = slots.grown(4)
    assert slots.holds(one)
    assert slots.size == 4
    other = sequence(3)
    slots.enter(other, 0, free=True)
    with_window(slots, other, 8, 3)
    ran(one, 13, 3, 39)
    ran(other, 13, 3, 39)
    assert slots.evidence().index.tolist() == [0, 3]


def test_progress_is_what_a_report_adds_to_the_last_look() -> None:
    slots, one = SequenceSlots(2), sequence(1)
    one.num_computed = 2
    slots.enter(one, 0, free=True)
    report = Report(
        num_computed=np.array([9, 12]),
        num_output=np.array([9, 9]),
        finished=np.zeros(2, bool),
        stopped=np.zeros(2, bool),
        num_forwards=np.array([9, 3]),
        num_token_instances=np.array([9, 20]),
        tokens=[None, None],
        num_run=3,
    )
    done = slots.progress(np.array([1]), report)
    assert [x.tolist() for x in vars(done).values()] == [[9], [3], [20], [1]]


def progress(forwards: list[int], slots: list[int], prompt: int = 0) -> Progress:
    zeros = np.zeros(len(forwards), np.int64)
    prompts = zeros.copy()
    prompts[0] = prompt
    return Progress(zeros, np.array(forwards), np.array(slots), prompts)


def test_a_burst_is_cut_where_sequences_finish() -> None:
    tokens, forwards, prompts = stretches(
        progress([10, 4, 10], [10, 4, 120]), np.array([0, 0, 8]), 256, 10
    )
    assert forwards.tolist() == [4, 6]
    assert tokens[0].tolist() == [14, 13]
    assert tokens[2].tolist() == [11, 10]
    assert tokens[3].tolist() == [18, 17]
    assert not prompts


def test_chunks_of_prompts_come_first_and_windows_run_beside_them() -> None:
    tokens, forwards, prompts = stretches(
        progress([10, 10], [10, 10], 500), np.array([0, 0]), 256, 10
    )
    assert prompts
    assert forwards.tolist() == [2, 8]
    assert tokens[0].tolist() == [252, 2]
    tokens, forwards, _ = stretches(progress([9], [9], 30), np.array([0]), 256, 10)
    assert forwards.tolist() == [1, 9]
    tokens, forwards, _ = stretches(progress([0], [0], 512), np.array([0]), 256, 2)
    assert (tokens[0].tolist(), forwards.tolist()) == ([256], [2])


@pytest.mark.parametrize("window", [0, 1, 8])
def test_a_burst_of_nothing_has_no_stretches(window: int) -> None:
    tokens, forwards, prompts = stretches(progress([0], [0]), np.array([window]), 256, 0)
    assert (tokens.shape, forwards.shape, prompts) == ((4, 0), (0,), False)
