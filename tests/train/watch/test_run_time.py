"""Where the time of a run went."""

import json

import pytest

from train.watch.run_time import KINDS, Attempt, RunTime, read_attempts, shares


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now

    def tick(self, seconds):
        self.now += seconds


def attempt(begun, seen, first, last, **seconds):
    return Attempt(begun, seen, first, last, {**dict.fromkeys(KINDS, 0.0), **seconds})


def test_speed_leaves_out_what_is_no_step(tmp_path):
    clock = Clock()
    time = RunTime(clock)
    clock.tick(7)
    with time.spent("compile"):
        clock.tick(60)
    time.begin(tmp_path, 10)
    for step in (11, 12):
        with time.spent("input"):
            clock.tick(0.5)
        clock.tick(4.5)
        time.step(step, 1000, 3.0)
        with time.spent("checkpoint"):
            clock.tick(100)
    record = time.read(peak_flops=2.0)
    assert record["step_seconds"] == 5.0
    assert record["tokens_per_second"] == 200.0
    assert record["input_wait"] == 0.1
    assert record["mfu"] == 6 / 10 / 2
    assert record["goodput"] == pytest.approx(9 / 277, abs=1e-4)
    clock.tick(4)
    time.step(13, 500)
    later = time.read()
    assert (later["step_seconds"], later["tokens_per_second"]) == (4.0, 125.0)
    assert "mfu" not in later
    time.close()
    [written] = read_attempts(tmp_path / "time.json")
    assert (written.first, written.last) == (10, 13)
    assert written.seconds == {
        "start": 7.0,
        "compile": 60.0,
        "input": 1.0,
        "checkpoint": 200.0,
        "evaluation": 0.0,
    }


def test_what_was_done_again_and_the_time_between_is_no_goodput():
    # 100 steps in 100 s, of which 60 are on disk; 50 s later a second attempt takes 10 s to begin.
    first = attempt(0, 120, 0, 100, start=5, compile=15)
    second = attempt(170, 240, 60, 110, start=10, compile=10)
    found = shares([first, second])
    assert sum(found.values()) == pytest.approx(1)
    seconds = {kind: round(240 * share, 6) for kind, share in found.items()}
    assert seconds == {
        "steps": 60 + 50,
        "redone": 40,
        "restart": 50 + 10,
        "start": 5,
        "compile": 25,
        "input": 0,
        "checkpoint": 0,
        "evaluation": 0,
    }


def test_an_attempt_that_a_later_one_undoes_was_for_nothing():
    attempts = [attempt(0, 10, 0, 10), attempt(10, 20, 10, 20), attempt(20, 30, 5, 15)]
    found = shares(attempts)
    assert found["steps"] == pytest.approx((5 + 0 + 10) / 30)
    assert found["redone"] == pytest.approx((5 + 10) / 30)


def test_a_second_attempt_goes_on_with_the_file(tmp_path, capsys):
    for begins in (0, 2):
        clock = Clock()
        clock.tick(begins * 10)
        time = RunTime(clock)
        time.begin(tmp_path, begins)
        clock.tick(10)
        time.step(begins + 2, 1)
        time.close()
    assert [a["first"] for a in json.loads((tmp_path / "time.json").read_text())] == [0, 2]
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "time since the run began (0:10): steps 100.0%",
        "time since the run began (0:30, 2 attempts): steps 66.7%, "
        "between the attempts and starting again 33.3%",
    ]
    (tmp_path / "time.json").write_text('[{"begun": 1')
    assert read_attempts(tmp_path / "time.json") == []
