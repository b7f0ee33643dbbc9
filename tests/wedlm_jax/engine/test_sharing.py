"""Sequences that come and go, share prefixes and run out of pages: a request gets the tokens it
gets alone."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.decode import (
    Case,
    as_if_first,
    assert_logprobs_near,
    cases,
    in_mode,
    requests_of,
    run,
    say_the_same,
    small_engine,
)
from wedlm_jax.engine.interface import Finished, Request, TokenDelta
from wedlm_jax.engine.scheduling import admission
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


@pytest.fixture(scope="module")
def short_engine(tiny_model):
    """Four at a time, and pages for hardly more than one of full length."""
    return small_engine(tiny_model, DRAWN, num_pages=20, deterministic=True)


def fresh(engine):
    """Forgets what is cached, and counts from zero."""
    engine.scheduler = engine._new_scheduler()
    return engine


def drafting(case, mode):
    return in_mode(case, mode, draft_budget=4.0)


some_cases = st.builds(drafting, cases(), st.sampled_from(MODES))


@st.composite
def with_headers(draw):
    """Requests that begin with the whole or a part of one header, or with none."""
    header = draw(st.lists(st.integers(0, 23), min_size=12, max_size=16))
    requests = []
    for case in draw(st.lists(some_cases, min_size=2, max_size=9)):
        part = draw(st.integers(0, len(header)))
        prompt = (*header[:part], *case.prompt[: max(28 - part, 1)])
        requests.append(dataclasses.replace(case, prompt=prompt))
    return requests


@given(requests=with_headers())
def test_shared_prefixes_change_no_token(engine, requests):
    alone = [run(fresh(engine), [case])[0] for case in requests]
    together = run(fresh(engine), requests)
    assert together == alone
    # And once more, where all of it is known.
    assert run(engine, requests) == alone
    engine.scheduler.check_accounts()
    assert engine.counters.pages_used == 0


@given(
    requests=st.lists(some_cases, min_size=1, max_size=8),
    gaps=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_whenever_it_comes_a_request_gets_what_it_gets_alone(engine, requests, gaps):
    alone = [run(engine, [case])[0] for case in requests]
    results = {}
    waiting, turn = requests_of(requests), 0
    while waiting or engine.has_work:
        now, waiting = waiting[:1], waiting[1:]
        for _ in range(gaps[turn % len(gaps)] + 1):
            for event in engine.step(now, max_forwards=1):
                if isinstance(event, Finished):
                    results[event.number] = as_if_first(event.result)
            now = []
        turn += 1
    assert [results[i] for i in range(len(requests))] == alone


@given(requests=with_headers())
def test_who_is_put_back_goes_on_with_the_same_tokens(engine, short_engine, requests):
    alone = [run(engine, [case])[0] for case in requests]
    for case, ours, theirs in zip(requests, run(short_engine, requests), alone, strict=True):
        assert say_the_same(ours, theirs)
        if case.params.mode != "verified":  # whose drafts are dropped when it is put back
            assert ours == theirs
    short_engine.scheduler.check_accounts()


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES)
def test_the_youngest_is_put_back_where_pages_run_out(engine, short_engine, mode):
    params = SamplingParams(
        mode=mode, max_tokens=20, entropy_threshold=1.6, ignore_eos=True, logprobs=2
    )
    batch = [Case((3 + i, 9, 4, 7, 5 + i, 2, 2, 8), params, 4) for i in range(4)]
    alone = [run(engine, [case])[0] for case in batch]
    results = run(fresh(short_engine), batch)
    counters = short_engine.counters
    assert counters.preemptions > 0
    assert counters.recomputed_tokens > 0
    for ours, theirs in zip(results, alone, strict=True):
        assert say_the_same(ours, theirs)
        assert_logprobs_near(ours, theirs)
        if mode != "verified":
            assert ours.forwards_at == theirs.forwards_at


def test_a_shared_prefix_is_computed_once(engine):
    header = tuple(range(2, 18))
    results = run(fresh(engine), [Case((*header, i + 2), PLAIN, 4) for i in range(8)])
    counters = engine.counters
    assert counters.prompt_tokens == len(header) + 8
    assert counters.prefix_tokens == 7 * len(header)
    assert len(results) == 8


@pytest.mark.parametrize("mode", MODES)
def test_equal_prompts_share_their_whole_pages(engine, mode):
    """Pages of four: of nine tokens, eight are taken over, for every mode."""
    case = Case((3, 4, 5, 6, 7, 8, 9, 2, 2), dataclasses.replace(PLAIN, mode=mode), 4)
    alone = run(fresh(engine), [case])[0]
    assert run(fresh(engine), [case] * 6) == [alone] * 6
    assert engine.counters.prompt_tokens == 9 + 5
    results = engine.decode(requests_of([case]))
    assert results[0].num_cached_tokens == 8


@pytest.mark.parametrize("mode", MODES)
def test_never_all_of_a_prompt_is_taken_over(engine, mode):
    """Its last token says the first of the completion, even where every page is known."""
    params = dataclasses.replace(PLAIN, mode=mode)
    long, short = (3, 4, 5, 6, 7, 8, 9, 2, 2, 5, 6, 7), (3, 4, 5, 6, 7, 8, 9, 2)
    requests = [Case(prompt, params, 4) for prompt in (long, long, short, short)]
    alone = [run(fresh(engine), [case])[0] for case in requests]
    assert [run(engine, [case])[0] for case in requests] == alone


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


def test_samples_share_their_prompt(engine):
    params = dataclasses.replace(PLAIN, temperature=1.0)
    prompt = tuple(range(2, 19))
    batch = [Case(prompt, dataclasses.replace(params, seed=i), 4) for i in range(5)]
    results = run(fresh(engine), batch)
    assert engine.counters.prompt_tokens == 17 + 4
    assert len({tuple(result.token_ids) for result in results}) > 1


def test_no_more_sequences_than_were_asked_for_and_pages_hold_tokens(engine):
    waiting = requests_of([Case((3 + i, 9), PLAIN, 4) for i in range(7)])
    seen = []
    while waiting or engine.has_work:
        engine.step(waiting, max_forwards=1)
        waiting = []
        seen.append(engine.counters.running)
    assert max(seen) == 2


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
