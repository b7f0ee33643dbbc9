"""SIGTERM, noted and acted on."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from infer.job.shard_decoder import GracefulStop, JobStopped


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_with_nothing_to_finish_it_ends_there() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(JobStopped), GracefulStop():
        ask()
    assert signal.getsignal(signal.SIGTERM) is before


def test_with_something_to_finish_it_has_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("infer.job.shard_decoder.time.monotonic", lambda: now)
    with GracefulStop(grace=20) as stop, stop.finishing():
        stop.check()
        ask()
        assert stop.requested
        now = 69.9
        stop.check()
        now = 70.0
        with pytest.raises(JobStopped):
            stop.check()


def test_afterwards_there_is_nothing_to_finish_again() -> None:
    with GracefulStop() as stop:
        with stop.finishing():
            pass
        with pytest.raises(JobStopped):
            ask()


def test_the_second_ends_the_process_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    monkeypatch.setattr(os, "_exit", ends.append)
    with GracefulStop(grace=1000) as stop, stop.finishing():
        ask()
        assert ends == []
        ask()
    assert ends == [143]


def test_what_handles_errors_lets_it_pass() -> None:
    assert not issubclass(JobStopped, Exception)


def test_in_another_thread_signals_are_left_alone() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with GracefulStop() as stop, stop.finishing():
            stop.check()
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
