from __future__ import annotations

import random

from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.scheduling.admission import ArrivalQueue
from wedlm_jax.engine.scheduling.sequence import SequenceState
from wedlm_jax.params import SamplingParams


def arrivals(waiting):
    return [sequence.arrival for sequence in waiting]


def new_sequence(arrival):
    return SequenceState(Request(arrival, (1,), SamplingParams()), arrival)


def test_who_is_put_back_gets_the_old_place():
    waiting = ArrivalQueue()
    sequences = [new_sequence(arrival) for arrival in range(6)]
    for sequence in sequences:
        waiting.put(sequence)
    for arrival in (0, 1, 3):
        waiting.remove(sequences[arrival])
    assert arrivals(waiting) == [2, 4, 5]
    waiting.put(sequences[3])
    waiting.put(sequences[1])
    assert arrivals(waiting) == [1, 2, 3, 4, 5]
    assert len(waiting) == 5


def test_taking_out_while_looking_through():
    waiting = ArrivalQueue()
    for arrival in range(5):
        waiting.put(new_sequence(arrival))
    seen = []
    for sequence in waiting:
        seen.append(sequence.arrival)
        if sequence.arrival % 2 == 0:
            waiting.remove(sequence)
    assert seen == [0, 1, 2, 3, 4]
    assert arrivals(waiting) == [1, 3]


def test_like_a_sorted_list_and_as_small():
    waiting, reference, chance = ArrivalQueue(), dict[int, SequenceState](), random.Random(0)
    out = []
    for arrival in range(3000):
        reference[arrival] = new_sequence(arrival)
        waiting.put(reference[arrival])
        while len(reference) > 10 or (reference and chance.random() < 0.4):
            leaving = chance.choice(sorted(reference)[:3])
            out.append(reference.pop(leaving))
            waiting.remove(out[-1])
        if out and chance.random() < 0.1:
            back = out.pop()
            reference[back.arrival] = back
            waiting.put(back)
        assert arrivals(waiting) == sorted(reference)
        assert len(waiting) == len(reference)
    assert len(waiting._arrivals) < 100
