"""The engine's loop, with an engine that says each request's prompt back, a token per step."""

import threading
import time

import pytest

from tests.examples.child import run_python
from wedlm_jax.completion import Completion
from wedlm_jax.engine.interface import Failed, Finished, Request, TokenDelta
from wedlm_jax.engine.loop import Caller, EngineLoop
from wedlm_jax.generation import Mailbox
from wedlm_jax.params import SamplingParams

PARAMS = SamplingParams()


class Echo:
    """An engine, and its own scheduler."""

    def __init__(self):
        self.running = {}
        self.scheduler, self.steps, self.seconds = self, 0, []
        self.fails, self.gate, self.entered = False, threading.Event(), threading.Event()
        self.gate.set()

    has_work = property(lambda self: bool(self.running))
    requests = property(lambda self: [request for request, _ in self.running.values()])
    numbers = property(lambda self: list(self.running))

    def restart(self):
        self.running.clear()

    def step(self, submitted=(), aborted=(), *, seconds=None, max_forwards=None, **_):
        self.running |= {one.number: [one, 0] for one in submitted}
        for number in aborted:
            self.running.pop(number, None)
        if max_forwards == 0:
            return []
        self.entered.set()
        assert self.gate.wait(30)
        if self.fails:
            raise RuntimeError("lost")
        self.steps += 1
        self.seconds.append(seconds)
        return [event for place in list(self.running.values()) for event in self._forward(place)]

    def _forward(self, place):
        request, at = place
        place[1] = at + 1
        yield delta(request, at)
        if place[1] == len(request.prompt):
            del self.running[request.number]
            yield Finished(request, Completion(None, list(request.prompt), "length", at, at))


def delta(request, at):
    return TokenDelta(request, [request.prompt[at]], None, at + 1, at, at, [at], [at])


def texts(events):
    return [event.token_ids for event in events if isinstance(event, TokenDelta)]


def until_finished(mailbox, count):
    events = []
    while sum(isinstance(event, Finished | Failed) for event in events) < count:
        events += mailbox.take()
    return events


@pytest.fixture
def echo():
    return Echo()


@pytest.fixture
def loop(echo):
    loop = EngineLoop(echo)
    yield loop
    loop.close()


def test_each_caller_gets_its_own_events(echo, loop):
    boxes = [Mailbox(), Mailbox(seconds=0.5)]
    requests = [
        Request(loop.new_number(), [10 * i + j for j in range(3 + i)], PARAMS, handle=box)
        for i, box in enumerate(boxes)
    ]
    loop.submit(requests)
    for request, box in zip(requests, boxes, strict=True):
        events = until_finished(box, 1)
        assert all(event.request is request for event in events)
        assert [token for some in texts(events) for token in some] == list(request.prompt)
    assert not loop.is_busy
    assert {*echo.seconds} <= {None, 0.5}, "the caller in a hurry counts for all"
    assert 0.5 in echo.seconds


def test_the_thread_serves_the_next_request_too_and_ends_when_none_comes(echo, loop, monkeypatch):
    box, threads = Mailbox(), set()
    for _ in range(3):
        loop.submit([Request(loop.new_number(), range(3), PARAMS, handle=box)])
        until_finished(box, 1)
        threads.add(loop._thread)
    (thread,) = threads
    monkeypatch.setattr("wedlm_jax.engine.loop.IDLE_SECONDS", 0.02)
    with loop.paused():  # wakes the thread, which waits for its second otherwise
        time.sleep(0.1)
        assert thread.is_alive(), "the engine is somebody's: it is not idle"
    thread.join(5)
    assert not thread.is_alive()
    loop.submit([Request(loop.new_number(), range(3), PARAMS, handle=box)])
    until_finished(box, 1)


def test_a_loop_without_requests_leaves_the_engine_to_others(echo, loop, monkeypatch):
    monkeypatch.setattr("wedlm_jax.engine.loop.IDLE_SECONDS", 0.02)
    box = Mailbox()
    loop.submit([Request(loop.new_number(), range(3), PARAMS, handle=box)])
    until_finished(box, 1)
    steps = echo.steps
    echo.running = {99: [Request(99, range(5), PARAMS), 0]}  # another's request
    time.sleep(0.2)
    loop.close()
    assert (echo.steps, [*echo.running]) == (steps, [99])


def test_nothing_comes_of_what_is_aborted_and_close_aborts_the_rest(echo, loop):
    box = Mailbox()
    first, second = (Request(loop.new_number(), range(10**6), PARAMS, handle=box) for _ in range(2))
    loop.submit([first, second])
    assert box.take()
    loop.abort([first.number])
    while first.number in echo.running:
        time.sleep(0.001)
    box.take()  # what was delivered by then
    assert {event.number for event in box.take()} == {second.number}
    loop.close()
    assert not echo.running
    assert not loop.is_busy


def test_a_pause_is_the_callers_own(echo, loop):
    box = Mailbox()
    echo.gate.clear()
    loop.submit([Request(loop.new_number(), range(3), PARAMS, handle=box)])
    assert echo.entered.wait(30)
    threading.Timer(0.05, echo.gate.set).start()
    with loop.paused():
        steps = echo.steps
        assert steps == 1, "it waits for the step under way"
        loop.submit([Request(loop.new_number(), range(3), PARAMS, handle=box)])
        time.sleep(0.05)
        assert echo.steps == steps
    until_finished(box, 2)


def test_a_failure_is_everybodys_and_the_next_request_finds_a_fresh_engine(echo, loop):
    box = Mailbox()
    echo.gate.clear()
    loop.submit([Request(loop.new_number(), range(9), PARAMS, handle=box)])
    loop.submit([Request(loop.new_number(), range(9), PARAMS, handle=box)])
    echo.fails = True
    echo.gate.set()
    events = until_finished(box, 2)
    assert [str(event.error) for event in events if isinstance(event, Failed)] == ["lost"] * 2
    echo.fails = False
    assert loop.restarts
    loop.submit([Request(loop.new_number(), range(2), PARAMS, handle=box)])
    assert isinstance(until_finished(box, 1)[-1], Finished)


def test_an_engine_that_cannot_start_afresh_fails_all(echo, loop):
    box = Mailbox()
    echo.fails, echo.restart = True, lambda: 1 / 0
    loop.submit([Request(loop.new_number(), range(9), PARAMS, handle=box)])
    until_finished(box, 1)
    echo.running.clear()
    loop.submit([Request(loop.new_number(), range(9), PARAMS, handle=box)])
    (failed,) = until_finished(box, 1)
    assert loop.is_broken
    assert "could not be restarted" in str(failed.error)


def test_tokens_are_held_for_a_patient_caller_and_a_last_event_is_not():
    request, other = (Request(n, range(9), PARAMS) for n in range(2))
    caller = Caller(print, patience=1.0)
    caller.hold(delta(request, 0))
    assert texts(caller.released(5.0)) == [[0]], "the first at once"
    caller.hold(delta(request, 1))
    caller.hold(delta(other, 0))
    caller.hold(delta(request, 2))
    assert caller.released(5.9) == []
    assert texts(caller.released(6.0)) == [[1, 2], [0]]
    caller.hold(delta(request, 3))
    caller.hold(Finished(request, Completion(None, [], "stop", 0, 0)))
    assert len(caller.released(6.1)) == 2
    assert caller.released(9.0) == []


@pytest.mark.parametrize(
    "last", [pytest.param("sys.exit(3)", marks=pytest.mark.full), "raise KeyboardInterrupt"]
)
def test_the_interpreter_ends_while_a_stream_is_under_way(checkpoint, last):
    script = f"""
import sys
from wedlm_jax import LLM, SamplingParams
llm = LLM({str(checkpoint)!r}, window_size=0, max_batch_size=1)
stream = llm.stream("the cat", SamplingParams(max_tokens=200, ignore_eos=True))
next(stream)
{last}
"""
    ended = run_python("-c", script, timeout=120)
    assert ended.returncode == (3 if "exit" in last else -2), ended.stderr
    assert "Fatal" not in ended.stderr
    assert "terminate" not in ended.stderr


def test_a_command_that_is_interrupted_does_not_wait_for_a_step(checkpoint):
    """As one in which programs are traced, before they are compiled."""
    script = f"""
import os, signal, sys, threading, time
from wedlm_jax import LLM
from wedlm_jax.engine.engine import Engine
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process

def step(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)
    until = time.monotonic() + 45
    while time.monotonic() < until:
        pass

Engine.step = step
llm = LLM({str(checkpoint)!r}, window_size=0, max_batch_size=1)
print("begun", time.time(), flush=True)
exit_process(run_command("it", lambda: llm.generate("the cat")))
"""
    ended = run_python("-c", script, timeout=120)
    took = time.time() - float(ended.stdout.split()[1])
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (130, "it: interrupted")
    assert took < 30
