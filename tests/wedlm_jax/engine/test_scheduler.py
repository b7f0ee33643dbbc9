"""What the scheduler plans and reports. That nothing is lost or mixed up, the machine tests."""

import dataclasses

import numpy as np
import pytest

from tests.wedlm_jax.engine.accounts import check_accounts
from tests.wedlm_jax.engine.fake_device import (
    WINDOW,
    FakeDevice,
    decode_alone,
    drain,
    new,
    numbers_of,
    request,
    results,
    small_sizes,
)
from wedlm_jax.engine.interface import Failed, NewTokens, TokenDelta, WindowForward
from wedlm_jax.engine.scheduler import Scheduler
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.errors import InputError


def test_deltas_of_two_steps_are_one():
    def deltas(longest_burst):
        scheduler, _ = new(longest_burst=longest_burst)
        events = drain(scheduler, [request(1, [5], max_tokens=6, logprobs=0)])
        return [event for event in events if isinstance(event, TokenDelta)]

    first, second = deltas(3)
    assert [first.followed_by(second)] == deltas(6)


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
    scheduler, device = new(sequences_each=1, longest_burst=2)
    events = scheduler.step([request(n, [5], max_tokens=4) for n in range(2)], ahead=True)
    assert len(numbers_of(events, TokenDelta)) == len(device.bursts) == 1


def test_a_burst_with_a_grammar_is_one_forward_planned_ahead():
    scheduler, device = new(longest_burst=2)
    asked = [request(1, [5], regex="a+", ignore_eos=False)]
    assert scheduler.step(asked, ahead=True) == []
    assert numbers_of(scheduler.step(ahead=True), TokenDelta) == [1]
    assert [burst.max_forwards for burst in device.bursts] == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "the prompt has no tokens"),
        ([1] * 91, 10, "a prompt of 91 tokens and max_tokens 10 exceed max_model_len 100"),
        ([1] * 70, 20, "need a cache of 96 tokens, window included, but it has 92"),
    ],
)
def test_what_could_never_be_decoded_is_refused(prompt, max_tokens, message):
    scheduler, device = new(num_pages=24)
    bad = request(1, prompt, max_tokens=max_tokens, mode="paper")
    longest = request(2, [1] * 66, max_tokens=20, mode="paper")
    events = drain(scheduler, [bad, longest])
    assert events[0].number == 1
    assert isinstance(events[0].error, InputError)
    assert message in str(events[0].error)
    assert len(results(events)[2].token_ids) == 20
    assert device.admitted == [2]


def test_an_idle_step_does_nothing():
    scheduler, device = new()
    assert scheduler.step() == []
    assert scheduler.step([request(5, [])], [5]) == []
    assert not device.bursts


def test_a_number_is_under_way_once_and_prefixes_are_forgotten_between_requests_alone():
    scheduler, _ = new(longest_burst=1)
    scheduler.step([request(1, range(20))])
    with pytest.raises(ValueError, match="request 1 is running or waiting already"):
        scheduler.step([request(1, [2])])
    with pytest.raises(RuntimeError, match="while no request runs or waits"):
        scheduler.forget_prefixes()


# --- aborts and errors --------------------------------------------------------------------


class ChangedDevice(FakeDevice):
    """A device whose reports are changed."""

    def __init__(self, sizes, changes):
        super().__init__(sizes)
        self.changes = changes

    def collect(self, ticket):
        return dataclasses.replace(super().collect(ticket), **self.changes)


def faulty(**changes):
    sizes = small_sizes(longest_burst=1)
    return Scheduler(ChangedDevice(sizes, changes), sizes, WindowChoice(0))


def test_an_error_ends_its_sequence_alone():
    scheduler = faulty(errors={0: ValueError("not a number")})
    events = scheduler.step([request(1, range(9)), request(2, range(9))])
    assert [event.number for event in events if isinstance(event, Failed)] == [1]
    assert scheduler._sequences.keys() == {2}
    check_accounts(scheduler)
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
    with pytest.raises(RuntimeError, match="request 1: the device reports"):
        scheduler.step([request(1, [1, 2])])


def test_a_device_that_does_nothing_is_not_asked_for_ever():
    counts = dict.fromkeys(["num_computed", "num_output", "num_forwards"], np.zeros(4, np.int32))
    scheduler = faulty(**counts, tokens=[None] * 4)
    with pytest.raises(RuntimeError, match="advanced no sequence"):
        scheduler.step([request(1, [1, 2])])


# --- bursts -------------------------------------------------------------------------------


def test_bursts_end_when_somebody_who_waits_may_begin():
    for count, until_finished in ((2, 2), (3, 1)):
        scheduler, device = new(sequences_each=2, longest_burst=64)
        scheduler.step([request(i, [i], max_tokens=5 + 45 * i) for i in range(count)])
        assert device.bursts[-1].until_finished.tolist() == [until_finished]
    scheduler.step()
    assert device.admitted == [0, 1, 2]


def test_a_caller_may_ask_for_fewer_forwards_or_none():
    scheduler, device = new()
    assert scheduler.step([request(1, [5]), request(2, [6])], max_forwards=0) == []
    assert len(device.sequences) == 2
    assert [sequence.index for sequence in scheduler.sequences] == [0, 1]
    events = scheduler.step(max_forwards=1)
    assert [event.num_output for event in events if isinstance(event, TokenDelta)] == [1, 1]
    ended = results(drain(scheduler))
    assert ended[1].token_ids == decode_alone(request(1, [5]), 0)[0]
    assert not scheduler.sequences


@pytest.mark.parametrize("traced", [False, True])
def test_windows_learn_from_bursts(traced):
    """A program that records forwards takes time that the others do not, so it teaches no costs."""
    seen = []

    class Watching(WindowChoice):
        def observe(self, running, burst, report, seconds):
            seen.append(([one.num_output for one in running], burst, report, seconds))

    sizes, forward = small_sizes(), WindowForward(0, [], [], [], [], 0.1, 0.1)
    device = ChangedDevice(sizes, {"traced": {0: forward} if traced else {}})
    scheduler = Scheduler(device, sizes, Watching(WINDOW))
    scheduler.step([dataclasses.replace(request(1, [1]), traced=traced)])
    ((before, burst, report, seconds),) = seen
    assert before == [0], "before they take it in"
    assert burst is device.bursts[0]
    assert report.num_output[0] > 0
    assert (seconds is None) == traced


# --- prefixes -----------------------------------------------------------------------------


def test_the_second_turn_of_a_conversation_computes_its_new_tokens_alone():
    scheduler, device = new()
    first = request(1, range(1, 22), max_tokens=17)
    answer = results(drain(scheduler, [first]))[1].token_ids
    prompt = [*range(1, 22), *answer, 7, 7, 7]
    events = drain(scheduler, [request(2, prompt)])
    # 38 tokens, of which the last was never computed: 9 pages of 4.
    assert results(events)[2].num_cached_tokens == 36
    assert device.bursts[-1].page_table.shape[1] >= 9
    assert scheduler.counters.prefix_tokens == 36
    assert scheduler.counters.prompt_tokens == 21 + 41 - 36


# --- pages that run out -------------------------------------------------------------------


def test_pages_for_later_forwards_are_taken_back_before_anybody_is_put_back():
    scheduler, _ = new(num_pages=30, max_text=80, longest_burst=64)
    rich, poor = request(0, [1] * 9, max_tokens=60), request(1, [2] * 9, max_tokens=60)
    scheduler.step([rich, poor])
    sequences = {one.number: one for one in scheduler._running}
    replica = scheduler._replicas[0]
    replica.trim(sequences[1], sequences[1].room_needed)
    replica.grow(sequences[0], replica.capacity(sequences[0]) + 4 * replica.num_available)
    assert replica.num_available == 0
    assert replica.shortfall() == 0
    sequences[1].num_computed = replica.capacity(sequences[1])
    assert replica.shortfall() == 1
    scheduler._secure(replica, [])
    assert scheduler.counters.preemptions == 0
    assert replica.num_available >= replica.shortfall()


class Widening(WindowChoice):
    """Every window is as wide as it may be, but only after the first burst."""

    is_wide = False

    def choose(self, running):
        widest = super().choose(running)
        return widest if self.is_wide else [0] * len(widest)


def test_who_would_begin_waits_where_windows_widen_instead():
    sizes = small_sizes(num_pages=13, max_text=40, longest_burst=1)
    windows, device = Widening(8), FakeDevice(sizes)
    scheduler = Scheduler(device, sizes, windows)
    old = [request(i, [i + 1] * 9, max_tokens=20, mode="verified") for i in range(2)]
    events = scheduler.step(old)
    while any(len(one.text) < 14 for one in scheduler._running):
        events += scheduler.step()
    windows.is_wide = True
    young = request(2, [7], max_tokens=5, mode="verified", window=0)
    events += scheduler.step([young])
    assert [one.number for one in scheduler._waiting] == [1, 2]
    assert 2 not in device.admitted
    ended = results([*events, *drain(scheduler)])
    assert scheduler.counters.preemptions > 0
    for one in (*old, young):
        assert ended[one.number].token_ids == decode_alone(one, 8 if one.window is None else 0)[0]


def test_while_somebody_waits_for_pages_they_hold_tokens():
    scheduler, _ = new(
        window=8,
        sequences_each=32,
        num_pages=260,
        page_size=16,
        max_text=400,
        chunk_tokens=64,
        longest_burst=64,
    )
    lengths = np.random.default_rng(0).integers(1, 300, (100, 2))
    many = [
        request(i, [i] * int(prompt), max_tokens=1 + int(answer) // 3, mode="verified")
        for i, (prompt, answer) in enumerate(lengths)
    ]
    scheduler.step(many)
    shares = []
    while (counters := scheduler.counters).waiting:
        places = counters.pages_used * 16
        shares.append((counters.places_computed + counters.places_spanned) / places)
        scheduler.step()
    assert len(shares) > 20
    assert np.mean(shares) >= 0.9
    drain(scheduler)


def test_pages_that_are_short_for_a_burst_after_the_last_are_not_missed():
    """The burst in flight may finish all there is, where planning the next one lacks pages."""
    scheduler, _ = new(sequences_each=2, num_pages=9, longest_burst=2, max_text=40)
    options = {"max_tokens": 6, "mode": "verified"}
    many = [request(number, [5] * 9, **options, seed=number) for number in range(2)]
    ended = results(drain(scheduler, many, ahead=True))
    for one in many:
        assert ended[one.number].token_ids == decode_alone(one, WINDOW)[0]
