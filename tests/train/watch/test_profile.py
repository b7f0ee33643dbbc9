"""Profiles: when they begin and end, whatever happens to the run meanwhile."""

import os
import signal

import pytest

from train.watch.profile import Profiler


@pytest.fixture
def traced(monkeypatch):
    """Every begin and end of a trace."""
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    return calls


def run(output, window, done, steps):
    with Profiler(output, *window) as profiler:
        for step in range(done, steps):
            profiler.before(step, step)
        profiler.end(steps, steps)


@pytest.mark.parametrize(
    ("window", "done", "steps", "told"),
    [
        ((3, 2), 0, 10, "steps 3 to 4"),
        ((3, 4), 5, 10, "steps 5 to 6"),  # a restart inside the window
        ((8, 5), 0, 10, "steps 8 to 9"),  # past the end
        ((0, 1), 0, 1, "steps 0 to 0"),
        ((3, 2), 5, 10, None),  # done before the restart
        ((12, 2), 0, 10, None),
        ((0, 0), 0, 10, None),
    ],
)
def test_what_the_recipe_names_is_recorded_once_and_ended(
    tmp_path, traced, capsys, window, done, steps, told
):
    run(tmp_path, window, done, steps)
    assert traced == (["start", "stop"] if told else [])
    said = capsys.readouterr().out
    assert f"profile of {told} in {tmp_path / 'profile'}" in said if told else said == ""


def test_a_run_that_fails_inside_the_window_ends_the_trace(tmp_path, traced):
    def fail():
        with Profiler(tmp_path, 0, 5) as profiler:
            profiler.before(0, 0)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert traced == ["start", "stop"]


def test_sigusr1_records_the_next_steps(tmp_path, traced, capsys):
    before = signal.getsignal(signal.SIGUSR1)
    with Profiler(tmp_path, 0, 0) as profiler:
        for step in range(20):
            if step in (4, 6):  # the second comes while one is under way
                os.kill(os.getpid(), signal.SIGUSR1)
            profiler.before(step, step)
    assert signal.getsignal(signal.SIGUSR1) is before
    assert traced == ["start", "stop"] * 2
    said = capsys.readouterr().out
    assert "steps 4 to 8" in said
    assert "steps 9 to 13" in said
