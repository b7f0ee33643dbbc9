"""A step that stands still shows its stacks."""

import time

from train.watch.stall import FEWEST, StallWatch


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
    said = stacks(tmp_path / "stacks.txt", 10.0)
    assert said.count("hang_in_a_step") == 1
    assert "Timeout" in said


def test_a_checkpoint_may_take_longer_and_0_watches_nothing(tmp_path):
    assert stacks(tmp_path / "paused.txt", 10.0, pause=True) == ""
    assert stacks(tmp_path / "none.txt", 0.0) == ""


def test_what_a_pause_allows_ends_with_the_next_step(tmp_path, monkeypatch):
    """A checkpoint among the first steps, of which too few are known to be watched."""
    monkeypatch.setattr("train.watch.stall.LONGEST_PAUSE_S", 0.2)
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
