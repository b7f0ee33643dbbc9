from __future__ import annotations

import pytest

from tests.wedlm_jax.engine.scheduling.test_burst_plan import new_sequence, running_replica
from wedlm_jax.engine.scheduling.burst_plan import PLAIN_FORWARDS, SHARE, PromptPace, chunk_tokens

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
