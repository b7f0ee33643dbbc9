"""Requests come, go and share prefixes while pages run out: nothing may be lost or mixed up."""

import random

import hypothesis.strategies as st
import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from tests.wedlm_jax.engine.accounts import check_accounts
from tests.wedlm_jax.engine.fake_device import WINDOW, FakeDevice, decode_alone, small_sizes
from wedlm_jax.engine.interface import Finished, Request, TokenDelta
from wedlm_jax.engine.scheduler import Scheduler
from wedlm_jax.engine.windows import WindowChoice
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams

LONGEST = 70
STEMS = [[1 + (7 * stem + i * i) % 40 for i in range(60)] for stem in range(2)]
MODES = ("paper", "verified", "ar")


class ShiftingWindows(WindowChoice):
    """Windows of mode "verified" change from burst to burst, as the speed would have it."""

    def __init__(self, window, seed):
        super().__init__(window)
        self._random = random.Random(seed)

    def choose(self, running):
        widest = super().choose(running)
        return [
            self._random.randint(0, most) if one.request.params.mode == "verified" else most
            for one, most in zip(running, widest, strict=True)
        ]


class Machine(RuleBasedStateMachine):
    """The scheduler against a device that checks what it reads."""

    requests = Bundle("requests")

    @initialize(
        replicas=st.integers(1, 2),
        sequences=st.integers(1, 5),
        pages=st.integers(20, 60) | st.integers(20, 26),
        chunk=st.integers(2, 40),
        burst=st.integers(1, 12),
        seed=st.integers(0, 99),
    )
    def begin(self, replicas, sequences, pages, chunk, burst, seed):
        sizes = small_sizes(
            replicas=replicas,
            sequences_each=sequences,
            num_pages=pages,
            chunk_tokens=chunk,
            longest_burst=burst,
            max_text=LONGEST,
        )
        self.device = FakeDevice(sizes, seed)
        self.scheduler = Scheduler(self.device, sizes, ShiftingWindows(WINDOW, seed))
        self.num_replicas = replicas
        self.submitted = []
        self.live = {}
        self.tokens = {}

    @rule(
        target=requests,
        stem=st.integers(0, 1),
        shared=st.integers(1, 55),
        tail=st.lists(st.integers(1, 40), max_size=3),
        max_tokens=st.integers(1, 15) | st.integers(30, 60),
        mode=st.sampled_from(MODES),
        window=st.sampled_from([None, None, 0, 2]),
        kind=st.sampled_from([list, np.array]),
        copies=st.integers(1, 3),
        seed=st.integers(0, 5),
    )
    def submit(self, stem, shared, tail, max_tokens, mode, window, kind, copies, seed):
        prompt = STEMS[stem][: min(shared, LONGEST - max_tokens - len(tail))] + tail
        made = []
        for copy in range(copies):
            params = SamplingParams(
                max_tokens=max_tokens, mode=mode, seed=seed + copy, draft_budget=1.0
            )
            made.append(Request(len(self.tokens), kind(prompt), params, window))
            self.tokens[made[-1].number] = []
            self.live[made[-1].number] = made[-1]
        self.submitted += made
        return multiple(*(request.number for request in made))

    @rule(length=st.integers(LONGEST + 1, 2 * LONGEST))
    def submit_too_long(self, length):
        number = len(self.tokens)
        self.tokens[number] = []
        request = Request(number, [1] * length, SamplingParams(max_tokens=1))
        failed, *events = self.scheduler.step([request])
        assert isinstance(failed.error, InputError)
        assert failed.number == number
        self.take(events)

    @rule(number=requests, ahead=st.booleans())
    def abort(self, number, ahead):
        """Also of those that are done, or not yet handed over."""
        self.live.pop(number, None)
        submitted, self.submitted = self.submitted, []
        self.take(self.scheduler.step(submitted, [number], ahead=ahead))

    @rule(times=st.integers(1, 4), ahead=st.booleans())
    def step(self, times, ahead):
        for _ in range(times):
            submitted, self.submitted = self.submitted, []
            self.take(self.scheduler.step(submitted, ahead=ahead))

    def take(self, events):
        for event in events:
            assert event.number in self.live, "an event of a request that is over"
            if isinstance(event, TokenDelta):
                self.tokens[event.number] += zip(event.token_ids, event.forwards_at, strict=True)
                assert event.num_output == len(self.tokens[event.number])
            else:
                assert isinstance(event, Finished)
                self.check_result(self.live.pop(event.number), event)

    def check_result(self, request, event):
        result = event.result
        widest = WINDOW if request.window is None else request.window
        window = 0 if request.params.mode == "ar" else widest
        tokens, reason, *counts = decode_alone(request, window)
        assert (result.token_ids, result.finish_reason) == (tokens, reason)
        assert self.tokens[request.number] == list(zip(tokens, result.forwards_at, strict=True))
        if request.params.mode != "verified":
            assert [result.num_forwards, result.num_token_instances] == counts
        assert result.forwards_at[-1] == result.num_forwards
        assert len(result.instances_at) == len(tokens)

    @invariant()
    def nothing_is_lost(self):
        check_accounts(self.scheduler)
        counters = self.scheduler.counters
        assert counters.pages_used + counters.pages_cached + counters.pages_free == counters.pages
        known = {*self.live} - {request.number for request in self.submitted}
        assert self.scheduler._sequences.keys() == known

    @invariant()
    def first_come_first_served(self):
        """Nobody overtakes, but for those who pass one that waits for a prompt; nor is anyone put
        back while a younger one goes on beside it."""
        for waiting in self.scheduler._waiting:
            if waiting.waited_for or (waiting.num_admissions and self.num_replicas > 1):
                continue
            for running in self.scheduler._running:
                assert running.arrival < waiting.arrival

    def teardown(self):
        """Whatever is left is done within as many steps as it has tokens: waiting is bounded."""
        if not hasattr(self, "scheduler"):
            return
        submitted, self.submitted = self.submitted, []
        self.take(self.scheduler.step(submitted))
        bound = 2 * sum(len(r.prompt) + r.params.max_tokens for r in self.live.values())
        for _ in range(bound):
            if self.live:
                self.take(self.scheduler.step())
                self.nothing_is_lost()
                self.first_come_first_served()
        assert not self.live, "not done in time"
        assert not self.scheduler.has_work
        assert self.scheduler.counters.pages_used == 0
        self.scheduler.forget_prefixes()
        check_accounts(self.scheduler)
        assert self.scheduler.counters.pages_free == self.scheduler.counters.pages


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=4 * settings.default.max_examples,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
