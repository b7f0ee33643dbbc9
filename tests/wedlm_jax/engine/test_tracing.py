"""Traced requests: the same tokens, and forwards that explain one another."""

import dataclasses
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.decode import batches, events_of, in_mode, requests_of, say_the_same
from wedlm_jax.engine.interface import Finished, Request, Traced
from wedlm_jax.params import SamplingParams


@pytest.mark.full
@settings(max_examples=4)
@given(data=st.data(), batch=batches())
def test_a_trace_explains_itself(one_size_engine, data, batch):
    modes = st.sampled_from(["paper", "verified", "ar"])
    batch = [in_mode(case, data.draw(modes)) for case in batch]
    plain = one_size_engine.decode(requests_of(batch))
    requests = [dataclasses.replace(one, traced=True) for one in requests_of(batch)]
    results, forwards = {}, defaultdict(list)
    for event in events_of(one_size_engine, requests):
        if isinstance(event, Traced):
            forwards[event.number].append(event)
        if isinstance(event, Finished):
            results[event.number] = event.result
    for request, expected in zip(requests, plain, strict=True):
        result, trace = results[request.number], forwards[request.number]
        assert say_the_same(result, expected)
        assert [token for one in trace for token in one.committed] == result.token_ids
        last = trace[-1]
        assert last.num_forwards == result.num_forwards == expected.num_forwards
        assert last.num_token_instances == result.num_token_instances
        ends = [one.forward.ended for one in trace]
        assert ends == sorted(ends)
        check = check_paper if request.params.mode == "paper" else check_anchored
        length, following = len(request.prompt), None
        for one in trace:
            assert following in (None, (one.forward.start, one.forward.held))
            following = check(one, request, length)
            length += len(one.committed)


def check_paper(one, request, length):
    """Checks what a forward committed and filled; returns the next window."""
    forward, params = one.forward, request.params
    assert forward.start == length
    masks = [slot for slot, token in enumerate(forward.held) if token is None]
    run = leading_run([token is not None for token in forward.held])
    assert one.committed == forward.held[: len(one.committed)]
    assert forward.rejected == []
    adjusted = {}
    for slot, entropy in enumerate(forward.entropies):
        assert (entropy is not None) == (slot in masks)
        if entropy is not None:
            adjusted[slot] = entropy + params.position_penalty * (slot - masks[0])
    threshold = params.entropy_threshold
    below = {slot for slot, value in adjusted.items() if threshold and value < threshold}
    filled = {slot for slot, token in enumerate(forward.drafted) if token is not None}
    assert filled == (below or {min(adjusted, key=lambda slot: adjusted[slot])})
    return following_window(forward, run, request.window)


def check_anchored(one, request, length):
    """The same where rows choose: drafts are committed up to the first that is wrong."""
    forward, window = one.forward, 0 if request.params.mode == "ar" else request.window
    assert forward.start == length - 1
    drafts = leading_run([token is not None for token in forward.held]) - 1
    right = (forward.rejected[0] - 1) if forward.rejected else drafts
    assert forward.rejected == list(range(right + 1, drafts + 1))
    # The last forward may commit fewer.
    assert len(one.committed) <= right + 1
    assert one.committed[:right] == forward.held[1 : right + 1][: len(one.committed)]
    if forward.rejected:
        assert len(one.committed) <= right or one.committed[right] != forward.held[right + 1]
        assert all(token is None for token in forward.drafted)
    filled = [slot for slot, token in enumerate(forward.drafted) if token is not None]
    assert filled == list(range(drafts + 2, drafts + 2 + len(filled)))
    spent = [forward.entropies[slot] for slot in filled]
    assert sum(spent) < 2.0 + 1e-5
    assert forward.entropies[0] is None
    assert forward.entropies[1] is not None
    return following_window(forward, len(one.committed), window, front=one.committed[-1])


def leading_run(filled):
    return filled.index(False) if False in filled else len(filled)


def following_window(forward, run, window, front=None):
    """The window that the next forward must see: slots behind the run, with what was filled and
    without what was rejected, W masks at its end open."""
    pairs = zip(forward.held, forward.drafted, strict=True)
    slots = [old if old is not None else new for old, new in pairs]
    slots = [None if slot in forward.rejected else token for slot, token in enumerate(slots)]
    slots = slots[run:]
    if front is not None:
        slots = [front, *slots[1:]]
    length = window + leading_run([token is not None for token in slots])
    return forward.start + run, (slots + [None] * length)[:length]


@pytest.mark.full
def test_a_preempted_or_aborted_sequence_leaves_no_trace_to_the_next(one_size_engine):
    params = SamplingParams(mode="verified", max_tokens=16, seed=1, ignore_eos=True)
    one_size_engine.step([Request(0, [3, 4, 5], params, traced=True)])
    events = events_of(one_size_engine, [Request(1, [6, 7], params)], [0])
    assert not [event for event in events if isinstance(event, Traced)]
