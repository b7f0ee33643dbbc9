"""Who is admitted, and where; how long bursts are, which pages they get, and the pace of long
prompts."""

import random
from array import array
from itertools import count

import numpy as np
import pytest

from tests.wedlm_jax.engine.accounts import check_replica
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.plan import (
    PLAIN_FORWARDS,
    PREFILL_FORWARDS,
    SHARE,
    SHORT_OF_PAGES_FORWARDS,
    SHORTEST_REUSE,
    WAITING_FORWARDS,
    WATCHED_FORWARDS,
    Admitter,
    ArrivalQueue,
    Chunks,
    PromptPace,
    burst_length,
    chunk_tokens,
    common_length,
    expected_rate,
    give_pages,
    prefill_forwards,
)
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.params import SamplingParams

PAGE = 4
NUMBERS = count()


def new_replica(number=0, *, sequences=4, pages=60):
    table = np.zeros((sequences, 50), np.int32)
    return Replica(number, num_sequences=sequences, num_pages=pages, page_size=PAGE, table=table)


class Queue:
    """A queue before some replicas; the window of every request is 0."""

    def __init__(self, replicas=1, sequences=4, pages=60):
        self.replicas = [
            new_replica(number, sequences=sequences, pages=pages) for number in range(replicas)
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
            check_replica(replica)
        return turn

    def compute(self, sequence, tokens):
        """So many tokens of a running sequence are final."""
        replica = next(r for r in self.replicas if sequence in r.running)
        sequence.num_computed = tokens
        replica.store(sequence)


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


def test_the_queue_is_in_order_of_arrival_and_small():
    waiting, chance, out = ArrivalQueue(), random.Random(0), []
    for arrival in range(3000):
        waiting.put(SequenceState(Request(arrival, (1,), SamplingParams()), arrival))
        while len(waiting) > 10 or (waiting and chance.random() < 0.4):
            out.append(chance.choice([*waiting][:3]))
            waiting.remove(out[-1])
        if out and chance.random() < 0.1:
            waiting.put(out.pop())
        arrivals = [sequence.arrival for sequence in waiting]
        assert arrivals == sorted(set(arrivals))
        assert len(waiting) == len(arrivals)
    assert len(waiting._arrivals) < 100


# --- bursts -------------------------------------------------------------------------------


def new_sequence(length=9, *, window=0, stop=""):
    params = SamplingParams(max_tokens=40, stop=(stop,) if stop else ())
    sequence = SequenceState(Request(0, range(length), params), 0)
    sequence.window = window
    return sequence


def running_replica(*sequences, num_pages=40):
    replica = new_replica(sequences=len(sequences), pages=num_pages)
    for sequence in sequences:
        replica.admit(sequence, [], len(sequence.text) + 2 * sequence.window + 1)
        sequence.num_computed = len(sequence.text) - 1
    return replica


@pytest.mark.parametrize(
    ("changes", "forwards", "until_finished"),
    [
        ({}, 64, [16, 3, 0]),
        ({"num_waiting": 1}, WAITING_FORWARDS, [2, 1, 1]),
        ({"num_waiting": 1, "pages_are_short": True}, SHORT_OF_PAGES_FORWARDS, [2, 1, 1]),
        ({"prefill_forwards": 1}, 64, [16, 3, 0]),
        ({"prefill_forwards": 20}, PREFILL_FORWARDS, [16, 3, 0]),
        ({"num_waiting": 3, "num_deferred": 3, "prefill_forwards": 1}, 1, [2, 1, 1]),
        ({"num_waiting": 3, "num_deferred": 3, "prefill_forwards": 5}, 5, [2, 1, 1]),
        ({"longest": 4, "num_waiting": 1}, 4, [2, 1, 1]),
        ({"prefill_forwards": 20, "chunks": Chunks(16, 1)}, 1, [16, 3, 0]),
        ({"chunks": Chunks(0, 30)}, 30, [1, 1, 1]),
        ({"chunks": Chunks(0, 90), "num_waiting": 1, "num_deferred": 1}, WAITING_FORWARDS, [1] * 3),
        ({"soon": True}, 64, [4, 1, 1]),
        ({"soon": True, "num_waiting": 1}, WAITING_FORWARDS, [4, 1, 1]),
        ({"stop": "x"}, WATCHED_FORWARDS, [16, 3, 0]),
    ],
)
def test_bursts_are_short_while_somebody_waits(changes, forwards, until_finished):
    """Each replica ends by its own sequences. A text that may stop is watched."""
    usual = {
        "longest": 64,
        "prefill_forwards": 0,
        "chunks": Chunks(16),
        "num_waiting": 0,
        "num_deferred": 0,
        "pages_are_short": False,
    }
    changes = dict(changes)
    running = [[new_sequence()] * count for count in (15, 3, 0)]
    running[0].append(new_sequence(stop=changes.pop("stop", "")))
    length = burst_length(running, **{**usual, **changes})
    assert (length.forwards, length.until_finished) == (forwards, until_finished)


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


@pytest.mark.parametrize(
    ("count", "num_pages", "forwards", "lasting", "capacity"),
    [
        (1, 40, 16, 16, 24),  # 8 are computed, and each forward commits a token
        (1, 40, 1000, 1000, 52),  # none behind the last of 9 + 40 tokens
        (3, 13, 64, 8, 16),  # where pages are short, all get some for fewer forwards
    ],
)
def test_pages_last_for_the_burst(count, num_pages, forwards, lasting, capacity):
    sequences = [new_sequence(9) for _ in range(count)]
    replica = running_replica(*sequences, num_pages=num_pages)
    assert give_pages(replica, forwards) == lasting
    assert [replica.capacity(sequence) for sequence in sequences] == [capacity] * count
    check_replica(replica)


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


# --- long prompts -------------------------------------------------------------------------

MOST, BALANCED = 256, 16


def prefilling(length, *, cached=0):
    sequence = new_sequence(length)
    sequence.num_cached_tokens = cached
    sequence.text_length_admitted = len(sequence.text)
    return sequence


def beside(*prompts, window=0):
    """A replica of four sequences that decode, and these prompts."""
    decoding = [new_sequence(window=window) for _ in range(4)]
    replica = running_replica(*decoding, num_pages=400)
    for one in decoding:
        one.num_computed = one.text_length_admitted
    replica.running = [*decoding, *prompts]
    return replica


def test_a_long_prompt_gets_as_many_tokens_as_double_the_forward_of_those_that_decode():
    def budget(replica, balanced=BALANCED):
        return chunk_tokens([replica], MOST, balanced)

    long = prefilling(300)
    assert budget(beside(prefilling(200))) is None
    assert budget(beside(prefilling(300, cached=100))) is None
    assert budget(beside(long)) == 16 - 5, "its own window may stand behind its last chunk"
    assert budget(beside(long), balanced=4) == 5, "at least as many as all windows run"
    assert budget(beside(long, window=16)) == 4 * 17 + 1
    alone = beside()
    alone.running = [long]
    assert budget(alone) is None
    starting = beside(long)
    for one in starting.running[:-1]:
        one.num_computed = one.text_length_admitted - 1
    assert budget(starting) is None, "they may need a token of their own prompts"


def seconds_of(pace, replica, chunk, forwards):
    """Runs forwards that take a second, or ``chunk`` seconds with a chunk; their times."""
    times = []
    while len(times) < forwards:
        chunks = pace.next_chunks([replica])
        ran = 8 if chunks.forwards is None else min(chunks.forwards, 64)
        each = chunk if chunks.tokens else 1.0
        pace.observe(chunks.tokens, ran, ran * each)
        times += [each] * ran
    return times


@pytest.mark.parametrize("chunk", [2.5, 10.0, 40.0, 300.0])
def test_others_wait_twice_as_long_on_average_where_chunks_take_longer(chunk):
    replica = beside(prefilling(30_000))
    times = seconds_of(PromptPace(MOST, BALANCED), replica, chunk, 3000)
    assert sum(times) / len(times) == pytest.approx(SHARE, rel=0.1)
    runs = "".join("c" if time > 1 else "." for time in times)
    assert "cccc" not in runs, "after a few chunks the others come first"
    assert times.count(chunk) >= 3000 / chunk - 2, "the prompt gets its share, too"


def test_chunks_that_take_no_longer_than_their_share_do_not_pause():
    times = seconds_of(PromptPace(MOST, BALANCED), beside(prefilling(30_000)), 1.9, 500)
    assert times[:PLAIN_FORWARDS] == [1.0] * PLAIN_FORWARDS
    assert set(times[PLAIN_FORWARDS:]) == {1.9}


def test_nothing_is_paced_where_no_long_prompt_is_beside_others():
    pace, replica = PromptPace(MOST, BALANCED), beside(prefilling(200))
    for _ in range(3):
        chunks = pace.next_chunks([replica])
        assert (chunks.tokens, chunks.forwards) == (MOST, None)
        pace.observe(chunks.tokens, 1, 100.0)
    seconds_of(pace, beside(prefilling(30_000)), 40.0, 20)
    assert pace.next_chunks([replica]).tokens == MOST
    assert pace.next_chunks([beside(prefilling(30_000))]).tokens == 0, "measured anew"


def test_a_burst_that_ran_nothing_teaches_nothing():
    pace, replica = PromptPace(MOST, BALANCED), beside(prefilling(30_000))
    pace.next_chunks([replica])
    pace.observe(0, 0, 1.0)
    assert pace.next_chunks([replica]).tokens == 0
