"""Engines whose windows vary have a program without windows: going from one to the other changes no
token and compiles nothing."""

import dataclasses

import numpy as np
import pytest

from tests.examples.checkpoints import tiny_config, tiny_model
from tests.examples.decode import (
    events_of,
    in_mode,
    random_cases,
    requests_of,
    run,
    say_the_same,
    small_engine,
)
from tests.examples.grammar import RandomAutomata
from wedlm_jax.decode import spans
from wedlm_jax.engine import probe
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Finished, Request
from wedlm_jax.engine.probe import _timed_prompt, interpolated, spread
from wedlm_jax.engine.windows import AutoWindows, WindowChoice
from wedlm_jax.params import SamplingParams


class ComeAndGo(WindowChoice):
    """Windows for some bursts, for everybody or for some, and then for nobody; with copies in all
    of them."""

    _bursts = 0

    def lookup(self, request):
        return self._lookup if request.params.mode == "verified" else 0

    def is_free(self, request):
        return True

    def choose(self, running):
        self._bursts += 1
        if self._bursts % 6 < 3:
            return [0] * len(running)
        turn = self._bursts + np.arange(len(running))
        wide = (turn % 3) * self._window // 2
        return [
            min(int(width), self.widest(one.request))
            for width, one in zip(wide, running, strict=True)
        ]


@pytest.fixture(scope="module")
def engine(tiny_model):
    """With few pages: sequences are put back, with windows and without."""
    expected = [SamplingParams(mode=mode, temperature=1.0) for mode in ("paper", "verified")]
    expected.append(SamplingParams(regex="0"))
    options = {"window_size": "auto", "lookup": 5, "num_pages": 26, "deterministic": True}
    engine = small_engine(tiny_model, expected, grammars=RandomAutomata(), **options)
    engine.windows = ComeAndGo(4, 5)
    engine.expect(expected)
    engine.release()
    engine.update(tiny_model)
    engine.compile()
    return engine


def test_windows_that_come_and_go_change_no_token_and_compile_nothing(engine):
    """Of sequences with a grammar and without."""
    batch = [
        in_mode(case, ("verified", "verified", "ar")[i % 3], regex=str(i) if i % 4 == 0 else None)
        for i, case in enumerate(random_cases(12, 3, draft_budget=4.0, ignore_eos=False))
    ]
    requests = [dataclasses.replace(one, window=None) for one in requests_of(batch)]
    programs, rooms, ended = engine.num_programs, set(), {}
    for event in events_of(engine, requests, max_forwards=2, ahead=True):
        rooms.add(engine.device._room.window)
        if isinstance(event, Finished):
            ended[event.number] = event.result
    results = [ended[request.number] for request in requests]
    assert rooms == {0, engine.settings.window}
    assert engine.num_programs == programs
    expected = run(engine, [in_mode(case, "ar") for case in batch])
    assert all(map(say_the_same, results, expected))
    assert all(sum(result.drafts[at] for result in results) for at in (0, 2)), "of both kinds"


@pytest.mark.full
@pytest.mark.parametrize(("mode", "window"), [("ar", None), ("paper", 2)])
def test_costs_are_learnt_where_others_run_already(tiny_model, mode, window, autoregressive_engine):
    """Measuring would overwrite what sequences have computed: first come some whose windows are
    not chosen."""
    engine = small_engine(tiny_model, [], window_size="auto", deterministic=True)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first = Request(0, (3, 9), dataclasses.replace(params, mode=mode), window)
    engine.step([first], max_forwards=1)
    assert isinstance(engine.windows, AutoWindows)
    assert engine.windows.costs is None
    second = Request(1, (4, 9), params)
    events = events_of(engine, [second])
    results = {event.number: event.result for event in events if isinstance(event, Finished)}
    assert engine.windows.costs is not None
    plain = Request(1, (4, 9), dataclasses.replace(params, mode="ar"))
    assert say_the_same(results[1], autoregressive_engine.decode([plain])[0])


@pytest.mark.parametrize("count", [0, 1, 2, 3, 9, 20])
def test_sizes_are_timed_from_the_ends_inwards(count):
    order = spread(range(count))
    assert sorted(order) == [*range(count)]
    assert order[:2] == [*range(count)][:: max(count - 1, 1)]
    for timed in range(2, count):
        gaps = np.diff(sorted(order[:timed]))
        assert gaps.max() <= 2 * (count - 1) / (timed // 2 + 1) + 1


def test_costs_of_sizes_that_were_not_timed_are_interpolated():
    bursts = {
        (1, True): {2: 0.003, 10: 0.011},  # overhead 0.001, a forward 0.001
        (1, False): {2: 0.005, 10: 0.021},
        (16, False): {2: 0.201},  # too slow for the longer burst
    }
    table = interpolated((1, 4, 16, 64), bursts)
    seconds = table.of_sizes((1, 4, 16, 64))
    np.testing.assert_allclose(seconds, [0.002, (0.002 * 0.1) ** 0.5, 0.1, 0.1])
    np.testing.assert_allclose(table.of_sizes((1, 4), windowless=True), seconds[:2] / 2)
    assert table.overhead == pytest.approx(0.001)


@pytest.mark.parametrize("windowless", [False, True])
def test_a_single_program_has_the_costs_of_both_and_noise_gives_no_negative_ones(windowless):
    table = interpolated((1, 16), {(16, windowless): {2: 0.2, 10: 0.1}})
    np.testing.assert_allclose(table.of_sizes((1, 16)), 0.01)
    np.testing.assert_allclose(table.of_sizes((1, 16), windowless=True), 0.01)


def prepared_device(model, **options):
    """That of an engine for one sequence."""
    engine = Engine(model, EngineConfig(max_batch_size=1, window_size="auto", **options))
    engine.device.prepare(engine.traits_of(Request(-1, (), SamplingParams(mode="verified"))))
    return engine.device


def test_a_larger_forward_is_timed_with_a_prompt(tiny_model):
    """One sequence decodes few tokens; its prompt runs in a larger forward, of either program. A
    burst for which the state was resized does not tell what forwards take."""
    device = prepared_device(tiny_model)
    for windowless, resized in [(True, True), (True, False), (False, True), (False, False)]:
        ((forwards, _, report),) = _timed_prompt(device, 40, windowless)
        assert (forwards, report.num_run, report.windowless) == (1, 1, windowless)
        assert report.timed == (not resized)
        # Beside the prompt: a window and the token before it, or that token alone.
        assert report.num_computed[0] >= 15
        assert report.num_token_instances[0] == (1 if windowless else 17)


def test_the_first_forward_at_a_size_does_not_tell_what_it_costs(monkeypatch):
    """It takes longer than later ones on a CPU, so nothing may be learnt from its time."""
    monkeypatch.setattr(spans, "_grid", lambda *_: [32, 64, 128])
    model = tiny_model(tiny_config(max_position_embeddings=512))
    device = prepared_device(model, chunk_tokens=64)
    reports = [
        report
        for tokens in (32, 32, 64, 64, 32)
        for _, _, report in _timed_prompt(device, tokens, False)
    ]
    used = [report.sizes[int(report.by_size.argmax())] for report in reports]
    assert used == [32, 32, 64, 64, 32]
    assert [report.timed for report in reports] == [False, True, False, True, True]


@pytest.mark.full
def test_prompts_are_timed_with_both_programs(monkeypatch):
    """Where a prompt runs in a larger forward than any window does."""
    timed = []

    def timed_prompt(device, tokens, windowless):
        timed.append((tokens, windowless))
        yield from _timed_prompt(device, tokens, windowless)

    monkeypatch.setattr(probe, "_timed_prompt", timed_prompt)
    monkeypatch.setattr(spans, "_grid", lambda *_: [32, 64, 128])
    model = tiny_model(tiny_config(max_position_embeddings=512))
    device = prepared_device(model)
    monkeypatch.setattr(probe, "SECONDS", 60.0)  # most of which goes into compiling here
    probe.measured(device)
    assert set(timed) == {(128, False), (128, True)}
