"""The scheduler's pages: prefixes that stay, and what happens when there are too few."""

import numpy as np
import pytest

from tests.wedlm_jax.engine.scheduling.fake_device import (
    FakeDevice,
    decode_alone,
    drain,
    small_sizes,
)
from tests.wedlm_jax.engine.scheduling.scheduler_examples import (
    WINDOW,
    new,
    request,
    results,
)
from wedlm_jax.engine.scheduling.scheduler import Scheduler
from wedlm_jax.engine.scheduling.sequence import SequenceState, widest_span
from wedlm_jax.engine.windows.choice import FixedWindows

# --- prefixes -----------------------------------------------------------------------------


def test_the_second_turn_of_a_conversation_computes_its_new_tokens_alone():
    scheduler, device = new()
    first = request(1, range(1, 22), max_tokens=17)
    answer = results(drain(scheduler, scheduler.step([first])))[1].token_ids
    prompt = [*range(1, 22), *answer, 7, 7, 7]
    events = drain(scheduler, scheduler.step([request(2, prompt)]))
    # 38 tokens, of which the last was never computed: 9 pages of 4.
    assert results(events)[2].num_cached_tokens == 36
    assert device.bursts[-1].page_table.shape[1] >= 9
    assert scheduler.counters.prefix_tokens == 36
    assert scheduler.counters.prompt_tokens == 21 + 41 - 36


def test_samples_share_the_pages_of_their_prompt():
    scheduler, device = new(longest_burst=1, chunk_tokens=64)
    samples = [request(i, range(42), seed=i, temperature=1.0) for i in range(4)]
    scheduler.step(samples)
    assert len(device.sequences) == 1
    scheduler.step()
    tables = device.bursts[-1].page_table[:, :10]
    assert (tables == tables[0]).all()
    assert tables.all()
    # One prompt, and for each sample the rest of it and its own tokens.
    assert scheduler.counters.pages_used <= 10 + 4 * 2
    ended = results(drain(scheduler))
    assert [ended[i].num_cached_tokens for i in range(4)] == [0, 40, 40, 40]


def test_prompts_that_are_computed_together_are_kept_once():
    scheduler, device = new(longest_burst=2, chunk_tokens=64)
    scheduler.step([request(i, range(20)) for i in range(3)])
    assert len(device.sequences) == 3  # too short to wait for
    scheduler.step()
    tables = device.bursts[-1].page_table[:3, :5]
    assert (tables == tables[0]).all()


def test_old_prefixes_make_way():
    scheduler, _ = new(num_pages=30)
    for number in range(8):
        drain(scheduler, scheduler.step([request(number, range(50 * number, 50 * number + 40))]))
    counters = scheduler.counters
    assert counters.preemptions == 0
    assert counters.pages_used == 0
    assert counters.pages_cached > 10
    assert counters.pages_cached + counters.pages_free == counters.pages == 29


def test_other_weights_forget_all_prefixes():
    scheduler, _ = new(longest_burst=1)
    events = scheduler.step([request(1, range(20))])
    with pytest.raises(RuntimeError, match="while no request runs or waits"):
        scheduler.forget_prefixes()
    drain(scheduler, events)
    scheduler.forget_prefixes()
    assert scheduler.counters.pages_cached == 0
    ended = results(drain(scheduler, scheduler.step([request(2, range(20))])))
    assert ended[2].num_cached_tokens == 0


# --- pages that run out -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ar", "verified", "paper"])
def test_the_youngest_is_put_back_and_goes_on_with_the_same_tokens(mode):
    scheduler, device = new(num_pages=26, max_model_len=80)
    many = [request(i, [i + 1] * 9, max_tokens=60, mode=mode) for i in range(4)]
    ended = results(drain(scheduler, scheduler.step(many)))
    assert scheduler.counters.preemptions > 0
    assert scheduler.counters.recomputed_tokens > 0
    for one in many:
        tokens, _, forwards, instances = decode_alone(one, 0 if mode == "ar" else WINDOW)
        result = ended[one.number]
        assert (result.token_ids, result.num_forwards) == (tokens, forwards)
        assert result.num_token_instances == instances
    assert device.admitted == [0, 1, 2, 3]
    assert next(iter(ended)) == 0  # the oldest is never put back


def test_pages_for_later_forwards_are_taken_back_before_anybody_is_put_back():
    scheduler, _ = new(num_pages=30, max_model_len=80, longest_burst=64)
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


class Widening(FixedWindows):
    """Every window is as wide as it may be, but only after the first burst."""

    is_wide = False

    def choose(self, running):
        widest = super().choose(running)
        return widest if self.is_wide else [0] * len(widest)


def test_who_would_begin_waits_where_windows_widen_instead():
    sizes = small_sizes(num_pages=13, max_model_len=40, longest_burst=1)
    windows, device = Widening(8), FakeDevice(sizes)
    scheduler = Scheduler(device, sizes, windows)
    old = [request(i, [i + 1] * 9, max_tokens=20, mode="verified") for i in range(2)]
    events = scheduler.step(old)
    while any(len(one.text) < 14 for one in scheduler._running):
        events += scheduler.step()
    windows.is_wide = True
    young = request(2, [7], max_tokens=5, mode="verified", window=0)
    events += scheduler.step([young])
    scheduler.check_accounts()
    assert [one.number for one in scheduler._waiting] == [1, 2]
    assert 2 not in device.admitted
    ended = results(drain(scheduler, events))
    for one in (*old, young):
        assert ended[one.number].token_ids == decode_alone(one, 8 if one.window is None else 0)[0]


def test_more_requests_than_places_are_served_in_their_order():
    scheduler, device = new(num_sequences=2)
    many = [request(i, [i] * 5, max_tokens=3 + i % 4) for i in range(9)]
    drain(scheduler, scheduler.step(many))
    assert device.admitted == list(range(9))


def test_a_long_prompt_is_not_overtaken_for_ever():
    scheduler, device = new(num_pages=26, longest_burst=2)
    scheduler.step([request(0, [1, 2, 3], max_tokens=40)])
    scheduler.step([request(1, range(80), max_tokens=10)])
    for number in range(2, 40):
        scheduler.step([request(number, [number] * 3, max_tokens=4)])
        if 1 in device.admitted:
            break
    assert 1 in device.admitted
    assert device.admitted[:2] == [0, 1]
    drain(scheduler)


def test_while_somebody_waits_for_pages_they_hold_tokens():
    scheduler, _ = new(
        window=8,
        num_sequences=32,
        num_pages=260,
        page_size=16,
        max_model_len=400,
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


def test_pages_last_for_a_forward_after_the_burst_in_flight_wherever_it_ends():
    """A burst may commit far more than sequences have committed on average, up to its pages."""
    one = SequenceState(request(1, [5] * 10, max_tokens=90, mode="verified"), arrival=0)
    one.window, one.num_computed = WINDOW, 9
    span = widest_span(WINDOW, 0)
    assert one.room_needed == 9 + span
    one.forwards_in_flight, one.capacity_in_flight = 8, 40
    assert one.room_needed == 40 + span
    one.forwards_in_flight = 2  # cannot come that far
    assert one.room_needed == 9 + 3 * span
    one.forwards_in_flight, one.capacity_in_flight = 64, 200
    assert one.room_needed == one.longest_room


def test_pages_that_are_short_for_a_burst_after_the_last_are_not_missed():
    """The burst in flight may finish all there is, where planning the next one lacks pages."""
    scheduler, _ = new(num_sequences=2, num_pages=9, longest_burst=2, max_model_len=40)
    options = {"max_tokens": 6, "mode": "verified"}
    many = [request(number, [5] * 9, **options, seed=number) for number in range(2)]
    events = scheduler.step(many, ahead=True)
    while scheduler.has_work:
        events += scheduler.step(ahead=True)
        scheduler.check_accounts()
    for one in many:
        assert results(events)[one.number].token_ids == decode_alone(one, WINDOW)[0]
