"""How long bursts are, which pages they get, and the pace of long prompts."""

import numpy as np
import pytest

from wedlm_jax.engine.burst_plan import (
    PLAIN_FORWARDS,
    PREFILL_FORWARDS,
    SHARE,
    SHORT_OF_PAGES_FORWARDS,
    WAITING_FORWARDS,
    WATCHED_FORWARDS,
    Chunks,
    PromptPace,
    burst_length,
    chunk_tokens,
    expected_rate,
    give_pages,
    prefill_forwards,
)
from wedlm_jax.engine.interface import Request
from wedlm_jax.engine.replica import Replica
from wedlm_jax.engine.sequence import SequenceState
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
