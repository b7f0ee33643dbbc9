"""The engine behind the server: what it does when a step fails and while it compiles, and which
program decodes what. Nobody waits for the compiler once the two programs are there."""

import concurrent.futures
import dataclasses
import threading

import httpx2
import pytest

from infer.serve import served_engine as module
from infer.serve.served_engine import Programs
from tests.examples.decode import events_of, say_the_same, small_engine
from tests.infer.serve.conftest import SMALL
from tests.infer.serve.running_server import running_server, wait_until
from wedlm_jax.engine.interface import Finished, Request
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams


@pytest.fixture(scope="module")
def tiny(checkpoint):
    """A model of one layer, with its plain program alone compiled."""
    llm = LLM(checkpoint, **SMALL)
    llm.warm_up(SamplingParams())
    return llm


@pytest.fixture
def own_server(tiny):
    with running_server(tiny) as server:
        yield server
        server.wait_until_idle()
        # The engine is every test's: a program that comes late would be the next one's.
        wait_until(lambda: not server.service.engine.programs.is_compiling, seconds=120)


def ask(server, timeout=60, **fields):
    body = {"prompt": "the cat", "max_tokens": 8} | fields
    return httpx2.post(f"{server.url}/v1/completions", json=body, timeout=timeout)


def fail_once(monkeypatch, server):
    """Makes the device fail in its next step."""
    device = server.service.engine.engine.device
    collect = device.collect

    def fails(*ticket):
        monkeypatch.setattr(device, "collect", collect)
        raise RuntimeError("RESOURCE_EXHAUSTED: the device is out of memory, and of 'secrets'")

    monkeypatch.setattr(device, "collect", fails)


def test_a_step_that_fails_is_a_500_and_the_engine_begins_anew(own_server, monkeypatch):
    before = ask(own_server)
    fail_once(monkeypatch, own_server)
    failed = ask(own_server)
    assert failed.status_code == 500
    assert failed.json()["error"]["type"] == "server_error"
    assert "secrets" not in failed.text
    after = ask(own_server)
    assert after.status_code == 200
    assert after.json()["choices"] == before.json()["choices"]
    fail_once(monkeypatch, own_server)
    stream = ask(own_server, stream=True)
    assert stream.status_code == 200
    assert '"type":"server_error"' in stream.text
    assert "[DONE]" not in stream.text
    assert ask(own_server, stream=True).text.endswith("data: [DONE]\n\n")
    metrics = httpx2.get(f"{own_server.url}/metrics").text
    assert "wedlm_engine_restarts_total 2.0" in metrics
    assert "wedlm_errors_total 2.0" in metrics
    assert httpx2.get(f"{own_server.url}/health").status_code == 200


def test_an_engine_that_cannot_begin_anew_says_so(tiny, monkeypatch):
    with running_server(tiny) as server, monkeypatch.context() as patch:
        fail_once(patch, server)
        patch.setattr(tiny.engine, "restart", lambda: 1 / 0)
        assert ask(server).status_code == 500
        assert ask(server).status_code == 500
        assert httpx2.get(f"{server.url}/health").status_code == 503
    tiny.engine.restart()


def test_others_go_on_while_a_program_is_compiled(tiny, own_server, monkeypatch):
    """One asks for what no program has yet; so does another, who goes and leaves nothing."""
    tiny.engine.device.programs.clear()
    tiny.warm_up(SamplingParams())
    begun, released = threading.Event(), threading.Event()
    compile_program = tiny.engine.compile_program

    def slowly(traits):
        begun.set()
        assert released.wait(30)
        compile_program(traits)

    monkeypatch.setattr(tiny.engine, "compile_program", slowly)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        special = pool.submit(ask, own_server, logprobs=2)
        assert begun.wait(10)
        with pytest.raises(httpx2.ReadTimeout):
            ask(own_server, timeout=0.3, bad_words=["x"])
        plain = [pool.submit(ask, own_server) for _ in range(6)]
        assert all(one.result(30).status_code == 200 for one in plain)
        assert not special.done()
        wait_until(lambda: own_server.service.engine.num_held == 1)
        released.set()
        answer = special.result(60).json()["choices"][0]
    assert answer["text"] == plain[0].result().json()["choices"][0]["text"]
    assert len(answer["logprobs"]["tokens"]) == 8
    assert ask(own_server).status_code == 200


def test_a_slow_grammar_is_refused_and_holds_up_nobody(own_server, tiny, monkeypatch):
    released = threading.Event()

    def slow(params):
        assert params.grammar is None or released.wait(30)

    monkeypatch.setattr(tiny.engine, "check_grammar", slow)
    monkeypatch.setattr("infer.serve.calls.GRAMMAR_SECONDS", 3.0)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, own_server, structured_outputs={"regex": "a+"})
        assert ask(own_server).status_code == 200
        assert not asked.done()
        answer = asked.result(30)
        released.set()
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "structured_outputs"
    assert answer.json()["error"]["message"] == "regex: expected one that compiles within 3 s"


def test_tokens_of_short_bursts_are_delivered_together(tiny, monkeypatch):
    """A stream gets its first tokens at once; later ones wait while bursts are shorter than asked
    for, unless a stop string may stand in them."""

    def pieces(server, **fields):
        fields = {"max_tokens": 40, "window_size": 0, "ignore_eos": True, "stream": True} | fields
        lines = ask(server, **fields).text.split("\n\n")
        return [line for line in lines if line.startswith("data: {")]

    monkeypatch.setattr("wedlm_jax.engine.scheduler.SOON_FORWARDS", 1)
    with running_server(tiny, burst_seconds=30) as server:
        hurried = pieces(server, stop=["no text has this"])
        assert len(pieces(server)) < len(hurried)


# --- programs ----------------------------------------------------------------------------

FAST = SamplingParams(mode="verified", max_tokens=8)
DRAWN = dataclasses.replace(FAST, temperature=0.9, top_p=0.5, min_p=0.1, seed=3)
LOGPROBS = dataclasses.replace(FAST, logprobs=3)
PENALTY = dataclasses.replace(FAST, frequency_penalty=0.7, min_tokens=4)
BIAS = dataclasses.replace(FAST, logit_bias={5: 3.0}, bad_words=((7, 8), (3,)))
PAPER = dataclasses.replace(FAST, mode="paper", entropy_threshold=1.6)
EVERYTHING = dataclasses.replace(
    DRAWN, logprobs=3, frequency_penalty=0.7, min_tokens=4, logit_bias={5: 3.0}, bad_words=((3,),)
)


def requests(*params):
    return [Request(number, (5, 9, 3, 11), one) for number, one in enumerate(params)]


class Compiler:
    """Stands for `Engine.compile_program`: notes what is wanted, and ends when it is told to."""

    def __init__(self, engine, monkeypatch):
        self.wanted = []
        self.changed, self.go = threading.Event(), threading.Event()
        self.error = None
        monkeypatch.setattr(engine, "compile_program", self.compile)
        self.programs = Programs(engine, self.changed.set)

    def compile(self, traits):
        self.wanted.append(traits)
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error

    def offer(self, *params):
        """How many requests join at once, and how many wait for a program."""
        ready, held, self.failed, _ = self.programs.admit(requests(*params))
        return len(ready), len(held)

    def finish(self):
        """Lets the compilation that is running, if any, end."""
        if self.programs.is_compiling:
            self.go.set()
            assert self.changed.wait(30)
            self.go.clear()
            self.changed.clear()


@pytest.fixture(scope="module")
def both(tiny_model):
    """An engine with the two programs that a server starts with."""
    engine = small_engine(tiny_model, [FAST])
    engine.compile()
    engine.compile_program(engine.everything)
    return engine


@pytest.mark.parametrize(
    "params",
    [EVERYTHING, PAPER, *(pytest.param(one, marks=pytest.mark.full) for one in (LOGPROBS, BIAS))],
)
def test_the_program_for_everything_gives_the_tokens_of_any_other(both, tiny_model, params):
    programs = both.num_programs
    events = events_of(both, requests(params), program=both.everything)
    (ours,) = (event.result for event in events if isinstance(event, Finished))
    assert both.num_programs == programs
    (theirs,) = small_engine(tiny_model, [params]).decode(requests(params))
    assert say_the_same(ours, theirs)
    for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_whoever_comes_joins_at_once_and_a_better_program_is_made_meanwhile(both, monkeypatch):
    monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    compiler = Compiler(both, monkeypatch)
    assert compiler.offer(FAST) == (1, 0)
    assert compiler.wanted == [], "the fast program is left alone"
    assert not both.compiled_for(both.traits_with(requests(FAST))).are_everything
    for params in (DRAWN, LOGPROBS, PENALTY):
        assert compiler.offer(params) == (1, 0)
    # One at a time, for the first; with what is mostly asked for together.
    assert compiler.programs.is_compiling
    (wanted,) = compiler.wanted
    assert wanted.truncated
    assert not wanted.are_everything
    for params in (LOGPROBS, PENALTY, BIAS):
        compiler.finish()
        compiler.offer(params)
    assert len(compiler.wanted) == 2, "few programs are made"


def test_a_failed_compilation_fails_nobody_who_can_be_decoded(both, monkeypatch):
    compiler = Compiler(both, monkeypatch)
    compiler.error = RuntimeError("too large")
    for _ in range(3):
        assert compiler.offer(DRAWN) == (1, 0)
        assert compiler.failed == []
        compiler.finish()
    assert len(compiler.wanted) == 1, "it is not tried again and again"


def test_without_the_two_programs_the_first_waits_and_fails_alone(tiny_model, monkeypatch):
    engine = small_engine(tiny_model, [])
    compiler = Compiler(engine, monkeypatch)
    first, second = DRAWN, LOGPROBS
    compiler.error = RuntimeError("too large")
    assert compiler.offer(first, second) == (0, 2)
    assert compiler.failed == [], "not before it is known"
    compiler.finish()
    compiler.error = None
    # The next is tried with its own program; then everything, so that nobody waits again.
    assert compiler.offer(first, second) == (0, 1)
    ((number, error),) = [(one.number, str(one.error)) for one in compiler.failed]
    assert (number, error) == (0, "too large")
    compiler.finish()
    compiler.offer()
    compiler.finish()
    needed = engine.traits_with(requests(second)).rounded
    assert compiler.wanted[1:] == [needed, engine.everything]
