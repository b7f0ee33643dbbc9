"""Who is admitted, and where."""

import random
from array import array
from itertools import count

import numpy as np
import pytest

from wedlm_jax.engine.admission import (
    SHORTEST_REUSE,
    Admitter,
    ArrivalQueue,
    common_length,
)
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.params import SamplingParams

PAGE = 4
NUMBERS = count()


class Queue:
    """A queue before some replicas; the window of every request is 0."""

    def __init__(self, replicas=1, sequences=4, pages=60):
        self.replicas = [
            Replica(
                number,
                num_sequences=sequences,
                num_pages=pages,
                page_size=PAGE,
                table=np.zeros((sequences, 50), np.int32),
            )
            for number in range(replicas)
        ]
        self.waiting = ArrivalQueue()
        self.admitter = Admitter(self.replicas, WindowChoice(0))

    def put(self, *tokens):
        number = next(NUMBERS)
        request = Request(number, tokens, SamplingParams(max_tokens=40))
        sequence = SequenceState(request, number)
        self.waiting.put(sequence)
        return sequence

    def admit(self):
        turn = self.admitter.admit(self.waiting)
        for replica in self.replicas:
            replica.check()
        return turn

    def compute(self, sequence, tokens):
        """So many tokens of a running sequence are final."""
        replica = next(r for r in self.replicas if sequence in r.running)
        sequence.num_computed = tokens
        replica.store(sequence)


def test_nobody_takes_pages_that_the_first_waits_for():
    queue = Queue(pages=11)
    first, large, small = queue.put(*range(20)), queue.put(*range(40, 63)), queue.put(1)
    turn = queue.admit()
    assert turn.admitted == [first]
    assert turn.pages_are_short
    assert list(queue.waiting) == [large, small]
    queue.replicas[0].remove(first)
    assert queue.admit().admitted == [large, small]


def test_pages_that_running_sequences_need_next_are_not_given_away():
    queue = Queue(pages=6)
    running = queue.put(*range(11))
    queue.admit()
    assert queue.replicas[0].num_available == 2
    queue.compute(running, 11)
    running.text.append(1)
    queue.put(7, 7)
    # One page would be enough for it, and another stays free for the running one.
    assert queue.replicas[0].shortfall() == 0
    assert len(queue.admit().admitted) == 1
    queue = Queue(pages=6)
    running = queue.put(*range(11))
    queue.admit()
    running.text.extend(range(2))
    queue.compute(running, 12)
    queue.put(7, 7)
    assert queue.replicas[0].shortfall() == 1
    assert queue.admit().admitted == []


def test_pages_given_for_later_forwards_are_taken_back_for_who_waits():
    queue = Queue(pages=11)
    running = queue.put(*range(9))
    queue.admit()
    queue.compute(running, 8)
    queue.replicas[0].grow(running, 36)
    new = queue.put(*range(50, 60))
    assert queue.admit().admitted == [new]
    assert queue.replicas[0].capacity(running) == 12


def test_a_prefix_that_is_being_computed_is_waited_for():
    queue = Queue()
    prompt = range(SHORTEST_REUSE + 2 * PAGE + 1)
    maker, other, short = (queue.put(*text) for text in (prompt, prompt, prompt[: -PAGE * 3]))
    turn = queue.admit()
    assert (turn.admitted, turn.num_deferred) == ([maker, short], 1), "a short one is not"
    queue.compute(maker, PAGE)
    assert queue.admit().num_deferred == 1
    queue.compute(maker, len(prompt) - 1)
    assert queue.admit().admitted == [other]
    assert other.num_computed == len(prompt) - 1
    assert other.nodes == maker.nodes


def test_whoever_waits_for_a_prompt_is_passed_but_keeps_room():
    queue = Queue(sequences=3)
    prompt = range(SHORTEST_REUSE + PAGE + 1)
    maker, other = queue.put(*prompt), queue.put(*prompt)
    passing, late = queue.put(5, 5), queue.put(6, 6)
    turn = queue.admit()
    # The third index is the one set aside.
    assert turn.admitted == [maker, passing]
    assert list(queue.waiting) == [other, late]
    queue.compute(maker, len(prompt) - 1)
    assert queue.admit().admitted == [other]


def test_nobody_waits_twice_for_the_same_request():
    queue = Queue()
    prompt = range(SHORTEST_REUSE + PAGE + 1)
    maker, other = queue.put(*prompt), queue.put(*prompt)
    assert queue.admit().num_deferred == 1
    queue.replicas[0].remove(maker)
    queue.waiting.put(maker)
    assert queue.admit().admitted == [maker, other]


def test_the_replica_with_fewer_sequences_comes_first():
    queue = Queue(replicas=2, sequences=8)
    placed = [(0, queue.put(1)), (0, queue.put(2)), (1, queue.put(*range(80)))]
    for number, sequence in placed:
        queue.waiting.remove(sequence)
        queue.replicas[number].admit(sequence, [], len(sequence.text))
    assert queue.replicas[0].num_available > queue.replicas[1].num_available
    new = queue.put(3)
    queue.admit()
    assert new.index // 8 == 1


def test_a_request_goes_where_its_prefix_is():
    queue = Queue(replicas=2)
    first, second = queue.put(*range(9)), queue.put(*range(20, 29))
    queue.admit()
    for sequence in (first, second):
        queue.compute(sequence, 8)
    again = queue.put(*range(20, 29), 1)
    queue.admit()
    assert (second.index // 4, again.index // 4) == (1, 1)
    assert again.num_computed == 8


def test_a_prefix_does_not_overload_a_replica():
    queue = Queue(replicas=2)
    first = queue.put(*range(9))
    queue.admit()
    queue.compute(first, 8)
    others = [queue.put(*range(9), tail) for tail in range(5)]
    queue.admit()
    places = [sequence.index // 4 for sequence in (first, *others)]
    assert places.count(0) == places.count(1) == 3


def test_a_full_replica_does_not_hold_up_a_request():
    queue = Queue(replicas=2, sequences=1)
    first = queue.put(*range(9))
    queue.admit()
    queue.compute(first, 8)
    other = queue.put(*range(9))
    assert queue.admit().admitted == [other]
    assert other.index == 1


@pytest.mark.parametrize(
    ("one", "other", "limit", "expected"),
    [
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], 5, 4),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 5, 5),
        ([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], 3, 3),
        ([1, 9, 3, 4], [1, 2, 3, 4], 4, 0),
        ([1], [2], 0, 0),
    ],
)
def test_common_length(one, other, limit, expected):
    assert common_length(array("i", one), array("i", other), limit, 2) == expected


def test_the_queue_is_like_a_sorted_list_and_as_small():
    waiting, reference, chance = ArrivalQueue(), {}, random.Random(0)
    out = []
    for arrival in range(3000):
        reference[arrival] = SequenceState(Request(arrival, (1,), SamplingParams()), arrival)
        waiting.put(reference[arrival])
        while len(reference) > 10 or (reference and chance.random() < 0.4):
            leaving = chance.choice(sorted(reference)[:3])
            out.append(reference.pop(leaving))
            waiting.remove(out[-1])
        if out and chance.random() < 0.1:
            back = out.pop()
            reference[back.arrival] = back
            waiting.put(back)
        assert [sequence.arrival for sequence in waiting] == sorted(reference)
        assert len(waiting) == len(reference)
    assert len(waiting._arrivals) < 100
