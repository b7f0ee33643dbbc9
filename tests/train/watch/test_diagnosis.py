"""Profiles of steps, and the stacks of a step that stands still."""

import os
import signal
import time

import pytest

from train.watch.diagnosis import FEWEST, Profiler, StallWatch


@pytest.fixture
def traced(monkeypatch):
    """Every begin and end of a trace."""
    calls = []
    monkeypatch.setattr("jax.profiler.start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append("stop"))
    return calls


def run(output, window, done, steps, fails_before=None):
    with Profiler(output, *window) as profiler:
        for step in range(done, steps):
            if step == fails_before:
                raise RuntimeError
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
    with pytest.raises(RuntimeError):
        run(tmp_path, (0, 5), 0, 10, fails_before=1)
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


def hang_in_a_step():
    time.sleep(0.4)


def stacks(path, factor, *, pause=False):
    """What is written when a step stands still after steps of a millisecond."""
    with path.open("w+") as file, StallWatch(factor, file, least=0.05) as watch:
        for _ in range(FEWEST + 1):
            watch.step()
            time.sleep(0.001)
        watch.step()
        if pause:
            watch.pause()
        hang_in_a_step()
        watch.step()
    return path.read_text()


def test_a_step_that_takes_far_too_long_shows_where_it_is(tmp_path):
    told = stacks(tmp_path / "stacks.txt", 10.0)
    assert told.count("hang_in_a_step") == 1
    assert "Timeout" in told
    # A checkpoint may take longer, and a factor of 0 watches nothing.
    assert stacks(tmp_path / "paused.txt", 10.0, pause=True) == ""
    assert stacks(tmp_path / "none.txt", 0.0) == ""


def test_what_a_pause_allows_ends_with_the_next_step(tmp_path, monkeypatch):
    """A checkpoint among the first steps, of which too few are known to be watched."""
    monkeypatch.setattr("train.watch.diagnosis.LONGEST_PAUSE_S", 0.2)
    with (tmp_path / "stacks.txt").open("w+") as file, StallWatch(10.0, file) as watch:
        watch.step()
        watch.pause()
        watch.step()
        hang_in_a_step()
    assert (tmp_path / "stacks.txt").read_text() == ""


def test_the_limit_follows_the_median_of_the_steps():
    now = [0.0]
    watch = StallWatch(10.0, None, least=30.0, now=lambda: now[0])
    watch._file = None
    limits = []
    for seconds in (50, 7, 7, 7, 7, 7, 7):
        watch.step()
        limits.append(watch.limit)
        now[0] += seconds
    assert limits == [None] * 5 + [70.0, 70.0]
    assert StallWatch(10.0).limit is None
