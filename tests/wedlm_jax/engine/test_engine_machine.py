"""Requests come, go and share prefixes while pages run out, on the device: nothing is lost, and
each gets the tokens that it gets alone."""

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from tests.examples.decode import assert_logprobs_near, say_the_same, small_engine
from tests.examples.grammar import RandomAutomata
from tests.wedlm_jax.engine.accounts import check_accounts
from wedlm_jax.engine import plan
from wedlm_jax.engine.interface import Failed, Finished, Request, TokenDelta
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

MODES = ("paper", "verified", "ar")
EXPECTED = [SamplingParams(mode=mode, temperature=1.0) for mode in MODES]
EXPECTED.append(SamplingParams(draft="both", regex="3"))
STEMS = [[2 + (5 * stem + i * i) % 20 for i in range(20)] for stem in range(2)]


@pytest.fixture(scope="module")
def engines(tiny_model):
    """One with pages for hardly two sequences, three of which decode together; and one for a
    sequence alone. Both at one size, so that their tokens are equal to the bit. Programs have
    log-probabilities only while somebody asks for them."""
    options = {"max_batch_size": 3, "lookup": 3, "deterministic": True}
    options["grammars"] = RandomAutomata()
    short = {"num_pages": 22, "max_model_len": 40, "backup_masks": 3}
    small = small_engine(tiny_model, EXPECTED, **options, **short)
    return small, small_engine(tiny_model, EXPECTED, **options)


class Machine(RuleBasedStateMachine):
    """The engine that is short of pages; results are compared with those of sequences alone."""

    def __init__(self):
        super().__init__()
        self.engine = self.small
        self.engine.restart()
        self.live = {}
        self.tokens = {}

    @rule(
        stem=st.integers(0, 1),
        shared=st.integers(1, 18),
        tail=st.lists(st.integers(2, 22), max_size=2),
        max_tokens=st.sampled_from([1, 4, 20]),
        mode=st.sampled_from(MODES),
        hot=st.booleans(),
        logprobs=st.sampled_from([None, None, 1, 9]),
        draft=st.sampled_from(["auto", "lookup", "both"]),
        grammar=st.sampled_from([None, None, "3", "7 dead"]),
        copies=st.integers(1, 3),
        ahead=st.booleans(),
    )
    def submit(
        self, stem, shared, tail, max_tokens, mode, hot, logprobs, draft, grammar, copies, ahead
    ):
        made = []
        for seed in range(copies):
            params = SamplingParams(
                mode=mode,
                temperature=float(hot),
                seed=seed,
                max_tokens=max_tokens,
                entropy_threshold=1.6,
                logprobs=logprobs,
                draft=draft,
                draft_budget=4.0,
                regex=None if mode == "paper" else grammar,
            )
            made.append(Request(len(self.tokens), (*STEMS[stem][:shared], *tail), params))
            self.tokens[made[-1].number] = []
            self.live[made[-1].number] = made[-1]
        self.take(self.engine.step(made, max_forwards=1, ahead=ahead))

    @rule(data=st.data(), forwards=st.integers(0, 1), ahead=st.booleans())
    def abort(self, data, forwards, ahead):
        if self.live:
            number = data.draw(st.sampled_from(sorted(self.live)))
            del self.live[number]
            self.take(self.engine.step(aborted=[number], max_forwards=forwards, ahead=ahead))

    @rule(forwards=st.integers(1, 6), ahead=st.booleans())
    def step(self, forwards, ahead):
        self.take(self.engine.step(max_forwards=forwards, ahead=ahead))

    def take(self, events):
        for event in events:
            request = self.live[event.number]
            if isinstance(event, TokenDelta):
                told = event.token_ids, event.forwards_at, event.instances_at
                self.tokens[event.number] += zip(*told, strict=True)
                assert event.num_output == len(self.tokens[event.number])
                continue
            del self.live[event.number]
            if isinstance(event, Failed):
                with pytest.raises(InputError, match="cannot continue"):
                    self.alone.decode([request])
                continue
            assert isinstance(event, Finished)
            result = event.result
            told = result.token_ids, result.forwards_at, result.instances_at
            assert list(zip(*told, strict=True)) == self.tokens[event.number]
            key = (request.prompt, request.params)
            if key not in self.known:
                (self.known[key],) = self.alone.decode([request])
            expected = self.known[key]
            assert say_the_same(result, expected)
            assert_logprobs_near(result, expected)
            if request.params.mode != "verified":  # whose drafts are lost when it is put back
                assert result.forwards_at == expected.forwards_at
                assert result.instances_at == expected.instances_at

    @invariant()
    def nothing_is_lost(self):
        check_accounts(self.engine.scheduler)
        assert self.engine.scheduler._sequences.keys() == self.live.keys()

    def teardown(self):
        for _ in range(500):
            if self.live:
                self.take(self.engine.step())
        assert not self.live, "not done in time"
        assert self.engine.counters.pages_used == 0


def test_requests_that_come_and_go(engines, monkeypatch):
    monkeypatch.setattr(plan, "SHORTEST_REUSE", 4)
    Machine.small, Machine.alone = engines
    Machine.known = {}
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=settings.default.max_examples // 2,
            stateful_step_count=20,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert len(Machine.known) > 10
