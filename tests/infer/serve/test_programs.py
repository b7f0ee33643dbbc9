"""Which program decodes what: nobody waits for the compiler once the two programs are there."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import pytest

from infer.serve import served_engine as module
from infer.serve.served_engine import Programs
from tests.examples.decode import Case, small_engine
from wedlm_jax.decode.options import Traits
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams

FAST = SamplingParams(mode="verified", max_tokens=8)
SPECIAL = [
    dataclasses.replace(FAST, temperature=0.9, seed=3),
    dataclasses.replace(FAST, temperature=0.9, top_p=0.5, min_p=0.1, seed=3),
    dataclasses.replace(FAST, logprobs=3),
    dataclasses.replace(FAST, frequency_penalty=0.7, min_tokens=4),
    dataclasses.replace(FAST, logit_bias={5: 3.0}, bad_words=((7, 8), (3,))),
    dataclasses.replace(FAST, mode="paper", entropy_threshold=1.6),
    dataclasses.replace(FAST, mode="ar"),
]


def request(number: int, params: SamplingParams) -> Request:
    return Request(number, (5, 9, 3, 11), params)


class Compiler:
    """Stands for `Engine.compile_program`: notes what is wanted, and compiles when it is told."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.wanted: list[Traits] = []
        self.changed, self.go = threading.Event(), threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(engine, "compile_program", self.compile)
        self.programs = Programs(engine, self.changed.set)

    def compile(self, traits: Traits) -> None:
        self.wanted.append(traits)
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error

    def finish(self) -> None:
        self.go.set()
        assert self.changed.wait(30)
        self.go.clear()
        self.changed.clear()


@pytest.fixture(scope="module")
def both(tiny_model: Transformer) -> Engine:
    """An engine with the two programs that a server starts with."""
    engine = small_engine(tiny_model, [FAST])
    engine.compile()
    engine.compile_program(engine.everything)
    return engine


@pytest.mark.parametrize("params", SPECIAL, ids=range(len(SPECIAL)))
def test_the_program_for_everything_gives_the_tokens_of_any_other(
    both: Engine, tiny_model: Transformer, params: SamplingParams
) -> None:
    programs = both.num_programs
    (ours,) = decode(both, params, both.everything)
    assert both.num_programs == programs
    (theirs,) = small_engine(tiny_model, [params]).decode([request(0, params)])
    assert (ours.token_ids, ours.finish_reason) == (theirs.token_ids, theirs.finish_reason)
    if theirs.logprobs is not None:
        assert ours.logprobs is not None
        found = [one.logprob for one in ours.logprobs]
        assert found == pytest.approx([one.logprob for one in theirs.logprobs], abs=1e-5)


def decode(engine: Engine, params: SamplingParams, program: Traits) -> list[Any]:
    from wedlm_jax.engine.interface import Finished

    events = engine.step([request(0, params)], program=program)
    while engine.has_work:
        events += engine.step(program=program)
    return [event.result for event in events if isinstance(event, Finished)]


def test_whoever_comes_joins_at_once_and_a_better_program_is_made_meanwhile(
    both: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(both, monkeypatch)
    for number, params in enumerate(SPECIAL):
        ready, held, traits = compiler.programs.choose([request(number, params)])
        assert (len(ready), held) == (1, [])
        compiler.programs.compile(held, traits)
    # One at a time, for the first; with what is mostly asked for together.
    assert compiler.programs.is_compiling
    (wanted,) = compiler.wanted
    assert wanted.truncated
    assert not wanted.are_everything
    compiler.finish()


def test_the_fast_program_is_left_alone(both: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(both, monkeypatch)
    ready, held, traits = compiler.programs.choose([request(0, FAST)])
    compiler.programs.compile(held, traits)
    assert ready
    assert not compiler.programs.is_compiling
    assert not both.compiled_for(traits).are_everything  # type: ignore[union-attr]


def test_few_programs_are_made(both: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PROGRAMS", 2)
    compiler = Compiler(both, monkeypatch)
    for number, params in enumerate(SPECIAL[2:6]):
        _, held, traits = compiler.programs.choose([request(number, params)])
        compiler.programs.compile(held, traits)
        if compiler.programs.is_compiling:
            compiler.finish()
    assert len(compiler.wanted) == 2


def test_a_failed_compilation_fails_nobody_who_can_be_decoded(
    both: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(both, monkeypatch)
    compiler.error = RuntimeError("too large")
    for _ in range(3):
        ready, held, traits = compiler.programs.choose([request(0, SPECIAL[0])])
        assert ready
        compiler.programs.compile(held, traits)
        if compiler.programs.is_compiling:
            compiler.finish()
        assert compiler.programs.failure() is None
    assert len(compiler.wanted) == 1, "it is not tried again and again"


def test_without_the_two_programs_the_first_waits_and_fails_alone(
    tiny_model: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = small_engine(tiny_model, [])
    compiler = Compiler(engine, monkeypatch)
    waiting = [request(0, SPECIAL[0]), request(1, SPECIAL[2])]
    ready, held, traits = compiler.programs.choose(waiting)
    assert (ready, held) == ([], waiting)
    compiler.error = RuntimeError("too large")
    compiler.programs.compile(held, traits)
    assert compiler.programs.failure() is None, "not before it is known"
    compiler.finish()
    failed = compiler.programs.failure()
    assert failed is not None
    assert (failed.number, str(failed.error)) == (0, "too large")
    assert compiler.programs.failure() is None
    # The next is tried with its own program; then everything, so that nobody waits again.
    compiler.error = None
    compiler.programs.compile(waiting[1:], traits)
    compiler.finish()
    compiler.programs.compile([], traits)
    compiler.finish()
    assert compiler.wanted[1:] == [
        engine.traits_with(waiting[1:]).rounded,
        engine.everything,
    ]


def test_requests_of_every_kind_share_the_program(both: Engine) -> None:
    cases = [Case((3, 4, 5), params, 4) for params in SPECIAL]
    traits = both.traits_with([request(i, case.params) for i, case in enumerate(cases)])
    assert both.compiled_for(traits) == both.everything
