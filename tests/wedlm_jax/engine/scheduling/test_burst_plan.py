from __future__ import annotations

import numpy as np
import pytest

from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.scheduling.burst_plan import (
    PREFILL_FORWARDS,
    SHORT_OF_PAGES_FORWARDS,
    WAITING_FORWARDS,
    WATCHED_FORWARDS,
    Chunks,
    burst_length,
    expected_rate,
    give_pages,
    prefill_forwards,
)
from wedlm_jax.engine.scheduling.replica import Replica
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.params import SamplingParams


def new_sequence(length=9, *, window=0, stop=""):
    params = SamplingParams(max_tokens=40, stop=(stop,) if stop else ())
    sequence = SequenceState(Request(0, range(length), params), 0)
    sequence.window = window
    return sequence


def running_replica(*sequences, num_pages=40):
    table = np.zeros((len(sequences), 40), np.int32)
    replica = Replica(
        0, num_sequences=len(sequences), num_pages=num_pages, page_size=4, table=table
    )
    for sequence in sequences:
        replica.admit(sequence, [], len(sequence.text) + 2 * sequence.window + 1)
        sequence.num_computed = len(sequence.text) - 1
    return replica


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (64, 16)),
        ({"num_waiting": 1}, (WAITING_FORWARDS, 2)),
        ({"num_waiting": 1, "pages_are_short": True}, (SHORT_OF_PAGES_FORWARDS, 2)),
        ({"prefill_forwards": 1}, (64, 16)),
        ({"prefill_forwards": 20}, (PREFILL_FORWARDS, 16)),
        ({"num_waiting": 3, "num_deferred": 3, "prefill_forwards": 1}, (1, 2)),
        ({"num_waiting": 3, "num_deferred": 3, "prefill_forwards": 5}, (5, 2)),
        ({"longest": 4, "num_waiting": 1}, (4, 2)),
        ({"prefill_forwards": 20, "chunks": Chunks(16, 1)}, (1, 16)),
        ({"chunks": Chunks(0, 30)}, (30, 1)),
        ({"chunks": Chunks(0, 90), "num_waiting": 1, "num_deferred": 1}, (WAITING_FORWARDS, 1)),
        ({"soon": True}, (64, 4)),
        ({"soon": True, "num_waiting": 1}, (WAITING_FORWARDS, 4)),
    ],
)
def test_bursts_are_short_while_somebody_waits(changes, expected):
    usual = {
        "longest": 64,
        "prefill_forwards": 0,
        "chunks": Chunks(16),
        "num_waiting": 0,
        "num_deferred": 0,
        "pages_are_short": False,
    }
    length = burst_length([[new_sequence()] * 16], **{**usual, **changes})  # type: ignore[arg-type]
    assert (length.forwards, length.until_finished) == (expected[0], [expected[1]])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [16, 3, 0]),
        ({"num_waiting": 1}, [2, 1, 1]),
        ({"soon": True}, [4, 1, 1]),
        ({"chunks": Chunks(0, 30)}, [1, 1, 1]),
    ],
)
def test_each_replica_ends_by_its_own_sequences(changes, expected):
    running = [[new_sequence()] * count for count in (16, 3, 0)]
    usual = {"longest": 64, "prefill_forwards": 0, "chunks": Chunks(16)}
    waits = {"num_waiting": 0, "num_deferred": 0, "pages_are_short": False}
    length = burst_length(running, **{**usual, **waits, **changes})
    assert length.until_finished == expected


def test_a_text_that_may_stop_is_watched():
    length = burst_length(
        [[new_sequence()], [new_sequence(stop="x")]],
        longest=64,
        prefill_forwards=0,
        chunks=Chunks(16),
        num_waiting=0,
        num_deferred=0,
        pages_are_short=False,
    )
    assert length.forwards == WATCHED_FORWARDS


def test_forwards_until_all_prompts_are_computed():
    one, two, ready = new_sequence(9), new_sequence(24), new_sequence(30)
    replica = running_replica(one, two, ready)
    one.num_computed, two.num_computed = 0, 8
    assert prefill_forwards(replica, 16) == 2
    assert prefill_forwards(replica, 0) == 0
    one.num_computed = 8
    assert prefill_forwards(replica, 16) == 1
    two.num_computed = 23  # the last token is the window's
    assert prefill_forwards(replica, 16) == 0


def test_pages_last_for_the_burst_where_there_are_enough():
    sequence = new_sequence(9)  # 8 computed, and a token a forward
    replica = running_replica(sequence)
    assert give_pages(replica, 16) == 16
    assert replica.capacity(sequence) == 24
    replica.check()


def test_no_pages_behind_the_last_token_that_may_come():
    sequence = new_sequence(9)
    replica = running_replica(sequence)
    give_pages(replica, 1000)
    assert replica.capacity(sequence) == 52  # 9 + 40 tokens


def test_all_get_pages_for_fewer_forwards_where_they_are_short():
    sequences = [new_sequence(9) for _ in range(3)]
    replica = running_replica(*sequences, num_pages=13)
    assert give_pages(replica, 64) == 8
    assert [replica.capacity(sequence) for sequence in sequences] == [16, 16, 16]
    replica.check()


def test_pages_for_later_forwards_are_given_back_to_those_who_need_them_now():
    rich, poor = new_sequence(9), new_sequence(9)
    replica = running_replica(rich, poor, num_pages=9)
    replica.grow(rich, 20)
    poor.text.extend(range(4))
    poor.num_computed = 12
    assert give_pages(replica, 64) == 4
    assert (replica.capacity(rich), replica.capacity(poor)) == (12, 16)


def test_the_rate_is_learnt_from_the_sequence():
    sequence = new_sequence(9, window=8)
    assert expected_rate(sequence) == 3
    sequence.text.extend(range(20))
    sequence.num_forwards = 10
    assert expected_rate(sequence) == 2.5
    sequence.window = 0
    assert expected_rate(sequence) == 1
