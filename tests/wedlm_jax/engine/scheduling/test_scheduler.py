from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.wedlm_jax.engine.scheduling.fake_device import (
    FakeDevice,
    decode_alone,
    drain,
    numbers_of,
    small_sizes,
)
from tests.wedlm_jax.engine.scheduling.scheduler_examples import (
    WINDOW,
    new,
    request,
    results,
)
from wedlm_jax.engine.interface import Failed, Finished, NewTokens, TokenDelta
from wedlm_jax.engine.scheduling.scheduler import Scheduler
from wedlm_jax.engine.windows.choice import FixedWindows
from wedlm_jax.errors import InputError

# --- requests, tokens and events ----------------------------------------------------------


@pytest.mark.parametrize("mode", ["ar", "verified", "paper"])
def test_a_result_is_that_of_the_sequence_alone(mode):
    scheduler, _ = new()
    one = request(7, [1, 2, 3], max_tokens=20, mode=mode)
    events = drain(scheduler, scheduler.step([one]))
    result = results(events)[7]
    tokens, reason, forwards, instances = decode_alone(one, 0 if mode == "ar" else WINDOW)
    assert result.token_ids == tokens
    assert (result.finish_reason, result.num_forwards) == (reason, forwards)
    assert result.num_token_instances == instances
    assert len(result.forwards_at) == len(result.instances_at) == 20
    assert result.logprobs is None
    assert result.num_cached_tokens == 0


def test_deltas_add_up_to_the_result():
    scheduler, _ = new(longest_burst=3)
    events = drain(scheduler, scheduler.step([request(1, [5], max_tokens=12)]))
    deltas = [event for event in events if isinstance(event, TokenDelta)]
    assert len(deltas) == 4
    assert isinstance(events[-1], Finished)
    result = events[-1].result
    assert [token for delta in deltas for token in delta.token_ids] == result.token_ids
    assert [delta.num_output for delta in deltas] == [3, 6, 9, 12]
    assert [delta.num_forwards for delta in deltas] == [3, 6, 9, 12]
    assert [at for delta in deltas for at in delta.forwards_at] == result.forwards_at


def test_deltas_of_two_steps_are_one():
    scheduler, _ = new(longest_burst=3)
    events = drain(scheduler, scheduler.step([request(1, [5], max_tokens=6, logprobs=0)]))
    first, second = (event for event in events if isinstance(event, TokenDelta))
    whole, _ = new(longest_burst=6)
    (expected,) = (
        event
        for event in drain(whole, whole.step([request(1, [5], max_tokens=6, logprobs=0)]))
        if isinstance(event, TokenDelta)
    )
    assert first.followed_by(second) == expected


def test_the_next_burst_runs_while_the_caller_has_the_events_of_the_last():
    scheduler, device = new(longest_burst=3)
    one = request(1, [5], max_tokens=9)
    steps = [scheduler.step([one], ahead=True), *(scheduler.step(ahead=True) for _ in range(2))]
    bursts = [len(device.bursts), *(len(numbers_of(events, TokenDelta)) for events in steps)]
    # The third, which is the last whatever it commits, is waited for at once.
    assert bursts == [3, 0, 1, 2]
    assert results(steps[-1])[1].token_ids == decode_alone(one, 0)[0]
    assert not scheduler.has_work


def test_nothing_is_planned_ahead_of_a_free_place():
    """A place that a burst frees would stay empty for the whole of the next one."""
    scheduler, device = new(num_sequences=1, longest_burst=2)
    events = scheduler.step([request(n, [5], max_tokens=4) for n in range(2)], ahead=True)
    assert len(numbers_of(events, TokenDelta)) == len(device.bursts) == 1


def test_a_burst_in_flight_is_over_before_a_grammar_is_asked():
    scheduler, _ = new(longest_burst=2)
    events = scheduler.step([request(1, [5], regex="a+", ignore_eos=False)], ahead=True)
    assert numbers_of(events, TokenDelta) == [1]


def test_what_was_aborted_in_flight_says_nothing_even_if_its_place_is_taken():
    scheduler, device = new(num_sequences=1, longest_burst=2)
    scheduler.step([request(1, [5], max_tokens=40)], ahead=True)
    events = scheduler.step([request(2, [7], max_tokens=40)], aborted=[1], ahead=True)
    assert device.bursts[-1].released == [0]
    events += drain(scheduler)
    assert {event.number for event in events} == {2}
    assert results(events)[2].token_ids == decode_alone(request(2, [7], max_tokens=40), 0)[0]


def test_a_stop_token_ends_a_sequence():
    scheduler, _ = new()
    many = [request(i, [i + 1], max_tokens=60, ignore_eos=False) for i in range(12)]
    ended = results(drain(scheduler, scheduler.step(many)))
    reasons = {number: result.finish_reason for number, result in ended.items()}
    assert set(reasons.values()) == {"stop", "length"}
    for one in many:
        assert reasons[one.number] == decode_alone(one, 0)[1]


def test_prompts_may_be_arrays():
    scheduler, _ = new()
    prompts = [[5, 6, 7], np.array([5, 6, 7]), range(5, 8)]
    many = [request(i, prompt) for i, prompt in enumerate(prompts)]
    ended = results(drain(scheduler, scheduler.step(many)))
    assert ended[0].token_ids == ended[1].token_ids == ended[2].token_ids


def test_a_window_of_its_own():
    scheduler, device = new()
    modes = [("paper", None), ("paper", 2), ("ar", 2), ("verified", 0)]
    requests = [request(i, [9], mode=mode, window=w) for i, (mode, w) in enumerate(modes)]
    scheduler.step(requests)
    assert device.bursts[0].windows.tolist() == [3, 2, 0, 0]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt has no tokens"),
        ([1] * 91, 10, "a prompt of 91 tokens and max_tokens 10 exceed max_model_len 100"),
        ([1] * 70, 20, "need a cache of 96 tokens with their window, and it has 92"),
    ],
)
def test_what_could_never_be_decoded_is_refused(prompt, max_tokens, message):
    scheduler, device = new(num_pages=24)
    bad = request(1, prompt, max_tokens=max_tokens, mode="paper")
    events = scheduler.step([bad, request(2, [1, 2])])
    assert isinstance(events[0], Failed)
    assert events[0].number == 1
    assert isinstance(events[0].error, InputError)
    assert message in str(events[0].error)
    assert numbers_of(drain(scheduler, events), Finished) == [2]
    assert device.admitted == [2]


def test_the_longest_that_fits_is_decoded():
    scheduler, _ = new(num_pages=24)
    events = drain(scheduler, scheduler.step([request(1, [1] * 66, max_tokens=20, mode="paper")]))
    assert len(results(events)[1].token_ids) == 20


def test_a_number_is_under_way_once():
    scheduler, _ = new(longest_burst=1)
    scheduler.step([request(1, [1])])
    with pytest.raises(ValueError, match="request 1 is running or waiting already"):
        scheduler.step([request(1, [2])])


def test_an_idle_step_does_nothing():
    scheduler, device = new()
    assert scheduler.step() == []
    assert scheduler.step([], [5]) == []
    assert not device.bursts


# --- aborts and errors --------------------------------------------------------------------


def test_an_abort_frees_pages_at_once_and_nothing_more_is_heard():
    scheduler, device = new(longest_burst=1)
    scheduler.step([request(1, range(20)), request(2, [1])])
    used = scheduler.counters.pages_used
    events = scheduler.step([], [1])
    assert scheduler.counters.pages_used <= used - 5
    assert device.bursts[-1].released == [0]
    assert 1 not in [event.number for event in drain(scheduler, events)]


def test_who_waits_may_be_aborted_too():
    scheduler, device = new(num_sequences=1, longest_burst=1)
    scheduler.step([request(1, [1]), request(2, [2])])
    events = scheduler.step([request(3, [3]), request(4, [])], [2, 3, 4])
    assert numbers_of(drain(scheduler, events), Finished) == [1]
    assert device.admitted == [1]
    assert not numbers_of(events, Failed)


def test_an_index_is_used_again_right_after_an_abort():
    scheduler, device = new(num_sequences=1, longest_burst=1)
    scheduler.step([request(1, range(20)), request(2, range(20))])
    scheduler.step([], [1])
    assert device.bursts[-1].released == [0]
    assert [admission.index for admission in device.bursts[-1].admissions] == [0]


def test_the_last_one_aborted_is_released_with_the_next_burst():
    scheduler, device = new(longest_burst=1)
    scheduler.step([request(1, [1])])
    assert scheduler.step([], [1]) == []
    assert len(device.bursts) == 1
    assert not scheduler.has_work
    scheduler.step([request(2, [2])])
    assert device.bursts[-1].released == [0]


class FaultyDevice(FakeDevice):
    """A device whose reports can be changed."""

    def __init__(self, sizes, changes):
        super().__init__(sizes)
        self.changes = changes

    def collect(self, ticket):
        return dataclasses.replace(super().collect(ticket), **self.changes)


def faulty(**changes):
    sizes = small_sizes(longest_burst=1)
    return Scheduler(FaultyDevice(sizes, changes), sizes, FixedWindows(0))


def test_an_error_ends_its_sequence_alone():
    scheduler = faulty(errors={0: ValueError("not a number")})
    events = scheduler.step([request(1, range(9)), request(2, range(9))])
    assert [event.number for event in events if isinstance(event, Failed)] == [1]
    assert scheduler._sequences.keys() == {2}
    scheduler.check_accounts()
    # What it computed is not to be trusted.
    assert scheduler._replicas[0].tree.num_pages == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"num_output": np.array([5, 0, 0, 0])},
        {"num_computed": np.array([30, 0, 0, 0])},
        {"num_computed": np.array([-1, 0, 0, 0])},
        {"tokens": [NewTokens([1, 2], [1, 1], [1, 1]), None, None, None]},
    ],
)
def test_a_report_that_cannot_be_true(changes):
    scheduler = faulty(**changes)
    with pytest.raises(RuntimeError, match="request 1: the device says"):
        scheduler.step([request(1, [1, 2])])


def test_a_device_that_does_nothing_is_not_asked_for_ever():
    nothing = np.zeros(4, np.int32)
    scheduler = faulty(
        num_computed=nothing, num_output=nothing, num_forwards=nothing, tokens=[None] * 4
    )
    with pytest.raises(RuntimeError, match="advanced no sequence"):
        scheduler.step([request(1, [1, 2])])


# --- bursts -------------------------------------------------------------------------------


def test_bursts_end_when_somebody_who_waits_may_begin():
    scheduler, device = new(num_sequences=2, longest_burst=64)
    scheduler.step([request(0, [1], max_tokens=5), request(1, [2], max_tokens=50)])
    assert device.bursts[-1].until_finished.tolist() == [2]
    scheduler, device = new(num_sequences=2, longest_burst=64)
    scheduler.step([request(i, [i], max_tokens=5 + 45 * i) for i in range(3)])
    assert device.bursts[-1].until_finished.tolist() == [1]
    scheduler.step()
    assert device.admitted == [0, 1, 2]


def test_prompts_are_computed_in_order_of_arrival():
    scheduler, device = new(longest_burst=1)
    scheduler.step([request(0, [1, 2], max_tokens=3), request(1, [3] * 60, max_tokens=20)])
    while 0 in scheduler._sequences:
        scheduler.step()
    scheduler.step([request(2, [4] * 60, max_tokens=20)])
    burst = device.bursts[-1]
    assert [admission.index for admission in burst.admissions] == [0]
    assert burst.arrival[0] > burst.arrival[1]


def test_a_caller_may_ask_for_fewer_forwards_or_none():
    scheduler, device = new()
    assert scheduler.step([request(1, [5]), request(2, [6])], max_forwards=0) == []
    assert len(device.sequences) == 2
    assert [scheduler.index_of(number) for number in (1, 2, 3)] == [0, 1, None]
    events = scheduler.step(max_forwards=1)
    assert [event.num_output for event in events if isinstance(event, TokenDelta)] == [1, 1]
    ended = results(drain(scheduler, events))
    assert ended[1].token_ids == decode_alone(request(1, [5]), 0)[0]
    assert scheduler.index_of(1) is None


def test_replicas_have_pages_of_their_own():
    scheduler, device = new(num_replicas=2)
    many = [request(i, [i + 1] * 9, max_tokens=12, mode="paper") for i in range(10)]
    events = drain(scheduler, scheduler.step(many))
    first = device.bursts[0]
    assert sorted(admission.index for admission in first.admissions) == list(range(8))
    assert first.page_table[0, 0] == first.page_table[4, 0]
    for one in many:
        assert results(events)[one.number].token_ids == decode_alone(one, WINDOW)[0]


def test_windows_learn_from_bursts():
    seen = []

    class Watching(FixedWindows):
        def observe(self, running, burst, report, seconds):
            seen.append(([one.num_output for one in running], burst, report, seconds))

    sizes = small_sizes()
    device = FakeDevice(sizes)
    scheduler = Scheduler(device, sizes, Watching(WINDOW))
    scheduler.step([request(1, [1])])
    ((before, burst, report, seconds),) = seen
    assert before == [0], "before they take it in"
    assert burst is device.bursts[0]
    assert report.num_output[0] > 0
    assert seconds is not None
