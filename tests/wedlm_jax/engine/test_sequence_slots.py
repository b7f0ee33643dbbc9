"""What is seen of sequences between two looks, and the forwards a burst was made of."""

from __future__ import annotations

import numpy as np

from wedlm_jax.engine.burst import Report, Request
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.sequence_slots import Progress, SequenceSlots, forward_tokens
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


def test_what_is_known_of_a_sequence_grows_old_without_a_window() -> None:
    slots, one = SequenceSlots(1), sequence(0)
    slots.enter(one, 0, free=True)
    with_window(slots, one, 0, 0)
    slots.own[0, 3] = -8.0
    ran(one, 100, 100, 100)
    slots.evidence()
    assert -2 < slots.own[0, 3] < 0


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
    assert [x.tolist() for x in vars(done).values()] == [[9], [3], [20], [1], [False]]


def progress(
    forwards: list[int], slots: list[int], prompts: list[int], finished: list[bool]
) -> Progress:
    zeros = np.zeros(len(forwards), np.int64)
    return Progress(
        zeros, np.array(forwards), np.array(slots), np.array(prompts), np.array(finished)
    )


def test_what_finishes_runs_first_and_what_goes_on_last() -> None:
    done = progress([10, 4, 10], [10, 4, 120], [0, 0, 0], [False, True, False])
    tokens, share = forward_tokens(done, np.array([0, 0, 8]), 256, 10)
    assert tokens[0].tolist() == [14] * 4 + [13] * 6
    assert tokens[2].tolist() == [11] * 4 + [10] * 6
    assert tokens[3].tolist() == [18] * 4 + [17] * 6
    assert share == 0


def test_prompts_are_computed_first_and_their_sequences_run_behind() -> None:
    done = progress([10, 8, 3], [10, 8, 3], [0, 300, 200], [False, False, True])
    tokens, share = forward_tokens(done, np.zeros(3, int), 256, 10)
    assert tokens[0].tolist() == [251, 252, 3, 3, 2, 2, 2, 2, 2, 2]
    assert share == 0.2


def test_a_burst_of_chunks_alone_has_their_tokens() -> None:
    tokens, share = forward_tokens(progress([0], [0], [512], [False]), np.array([8]), 256, 2)
    assert tokens.tolist() == [[256, 256], [0, 0], [256, 256], [256, 256]]
    assert share == 1


def test_a_burst_of_nothing_has_no_forwards() -> None:
    tokens, _ = forward_tokens(progress([0], [0], [0], [False]), np.array([8]), 256, 0)
    assert tokens.shape == (4, 0)
