"""What sequences that share prefixes save, and programs that change under those put back. That each
gets the tokens that it gets alone, the engine's state machine tests."""

import dataclasses

import pytest

from tests.examples.decode import (
    Case,
    as_if_first,
    requests_of,
    run,
    say_the_same,
    small_engine,
)
from wedlm_jax.engine import admission
from wedlm_jax.engine.interface import Finished, Request, TokenDelta
from wedlm_jax.params import SamplingParams

PLAIN = SamplingParams(mode="paper", max_tokens=12, entropy_threshold=1.6)
MODES = ("paper", "verified", "ar")
DRAWN = [SamplingParams(mode=mode, temperature=1.0, top_k=3) for mode in MODES]


@pytest.fixture(autouse=True, scope="module")
def short_prefixes_are_waited_for():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "SHORTEST_REUSE", 4)
        yield


@pytest.fixture(scope="module")
def engine(tiny_model):
    """Two sequences at a time."""
    return small_engine(tiny_model, DRAWN, max_batch_size=2, deterministic=True)


def fresh(engine):
    """Forgets what is cached, and counts from zero."""
    engine.scheduler = engine._new_scheduler()
    return engine


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", [8, 9])
def test_equal_prompts_share_their_whole_pages(engine, mode, length):
    """Pages of four: of nine tokens, eight are taken over; of eight, four, since the last token
    says the first of the completion."""
    prompt = (3, 4, 5, 6, 7, 8, 9, 2, 2)[:length]
    case = Case(prompt, dataclasses.replace(PLAIN, mode=mode), 4)
    shared = (length - 1) // 4 * 4
    alone = run(fresh(engine), [case])[0]
    assert run(fresh(engine), [case] * 6) == [alone] * 6
    assert engine.counters.prompt_tokens == length + 5 * (length - shared)
    results = engine.decode(requests_of([case]))
    assert results[0].num_cached_tokens == shared


def test_the_second_turn_of_a_conversation_finds_the_first(engine):
    first = Case((3, 9, 4, 7, 5), dataclasses.replace(PLAIN, ignore_eos=True), 4)
    (answer,) = run(fresh(engine), [first])
    prompt = (*first.prompt, *answer.token_ids, 8, 8)
    second = Case(prompt, dataclasses.replace(PLAIN, max_tokens=6), 4)
    (warm,) = engine.decode(requests_of([second]))
    (cold,) = run(fresh(engine), [second])
    # All that was committed but the last token or two, whose keys nobody has computed.
    assert warm.num_cached_tokens >= len(first.prompt) + len(answer.token_ids) - 8
    assert as_if_first(warm) == cold


@pytest.fixture(scope="module")
def logprobs_engine(tiny_model):
    """Two at a time, and pages for hardly more than one; a program with log-probabilities and one
    without."""
    expected = [SamplingParams(mode=mode) for mode in ("paper", "verified")]
    return small_engine(tiny_model, expected, max_batch_size=2, num_pages=18, deterministic=True)


@pytest.mark.parametrize("mode", ["paper", "verified"])
@pytest.mark.parametrize(
    ("before", "own", "later"),
    [(9, 1, None), (None, 1, 9), (1, None, None), (None, None, 1), (9, 1, 9)],
)
def test_who_is_put_back_goes_on_in_a_program_of_other_log_probabilities(
    logprobs_engine, mode, before, own, later
):
    """Programs have log-probabilities only while someone asks for them."""
    engine = fresh(logprobs_engine)
    usual = SamplingParams(
        mode=mode, max_tokens=36, ignore_eos=True, entropy_threshold=1.6, draft_budget=4.0
    )

    def request(number, logprobs, **changes):
        params = dataclasses.replace(usual, logprobs=logprobs, **changes)
        return Request(number, (3 + number, 9, 4), params)

    first, second, third = request(0, before), request(1, own), request(2, later, max_tokens=2)
    expected = [engine.decode([one])[0] for one in (first, second, third)]
    engine = fresh(engine)
    results = {}
    room = set()
    submitted, waiting = [first, second], [third]
    while submitted or engine.has_work:
        for event in engine.step(submitted, max_forwards=2):
            if isinstance(event, TokenDelta):
                asked = (first, second, third)[event.number].params.logprobs
                assert (event.logprobs is None) == (asked is None)
            elif isinstance(event, Finished):
                results[event.number] = event.result
        room.add(engine.device.traits.logprobs)
        submitted = []
        if engine.counters.preemptions and waiting:
            submitted, waiting = waiting, []
    assert engine.counters.preemptions == 1
    assert len(room) > 1 or own is not None
    for ours, theirs in zip(map(results.get, range(3)), expected, strict=True):
        assert ours is not None
        assert say_the_same(ours, theirs)
        assert ours.logprobs == theirs.logprobs
