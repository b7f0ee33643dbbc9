"""Signals that come while the main thread waits for a compiler."""

import os
import signal
import threading
import time

import pytest

from tests.examples.child import run_python
from wedlm_jax.__main__ import main
from wedlm_jax.errors import CompilingInterrupted
from wedlm_jax.host.signals import StopRequest, compiled, signal_thread

BEGIN = """
import os, signal, threading, time
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import compiled, exit_process
"""
IN_THE_MAIN_THREAD = """
threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
exit_process(run_command("it", lambda: compiled(lambda: time.sleep(60))))
"""
IN_ANOTHER_THREAD = """
def command():
    begun = threading.Event()
    slow = lambda: (begun.set(), time.sleep(45))
    threading.Thread(target=compiled, args=[slow]).start()
    begun.wait()
    raise KeyboardInterrupt

exit_process(run_command("it", command))
"""
"""As the engine's, which compiles for a main thread that waits for tokens."""


def test_a_compilers_result_and_its_error_come_back():
    assert compiled(lambda: threading.current_thread().name) == "compile"
    with pytest.raises(ZeroDivisionError):
        compiled(lambda: 1 / 0)


def test_other_threads_compile_themselves():
    names = []
    thread = threading.Thread(
        target=lambda: names.append(compiled(lambda: threading.current_thread().name)), name="mine"
    )
    thread.start()
    thread.join()
    assert names == ["mine"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_noted_signal_does_not_wait_for_a_compiler(number):
    went_on = threading.Event()

    def compiling():
        os.kill(os.getpid(), number)
        went_on.wait(10)

    with StopRequest(number) as stop:
        started = time.monotonic()
        with pytest.raises(CompilingInterrupted) as interrupt:
            compiled(compiling)
        assert time.monotonic() - started < 5
        went_on.set()
        assert interrupt.value.status == 128 + number
        assert stop.requested
        os.kill(os.getpid(), number)  # and elsewhere it is noted, as ever


def test_a_signal_is_told_before_the_main_thread_handles_it():
    told, handled, numbers = threading.Event(), [], []

    def tell(number):
        numbers.append(number)
        told.set()

    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.append(number))
    try:
        with signal_thread(tell):
            # Where the main thread computes, in C, a handler waits; here it is kept from coming.
            signal.raise_signal(signal.SIGUSR1)
            assert told.wait(10)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert numbers == handled == [signal.SIGUSR1]
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_noted_while_a_program_was_traced_does_not_wait_for_its_compiler():
    compiled_all_the_same = []
    with StopRequest(signal.SIGTERM):
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(CompilingInterrupted) as interrupt:
            compiled(lambda: compiled_all_the_same.append(True))
    assert interrupt.value.status == 128 + signal.SIGTERM
    assert not compiled_all_the_same
    assert compiled(lambda: 1) == 1, "and it is forgotten with the block"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (IN_THE_MAIN_THREAD, "it: interrupted while compiling"),
        (IN_ANOTHER_THREAD, "it: interrupted"),
    ],
    ids=["main thread", "another thread"],
)
def test_an_interrupted_command_does_not_wait_for_a_compiler(script, message):
    started = time.monotonic()
    ended = run_python("-c", BEGIN + script, timeout=50)
    assert (ended.returncode, ended.stderr) == (130, f"{message}\n")
    assert time.monotonic() - started < 40


def test_a_command_within_a_program_returns_while_another_thread_compiles():
    """As `main` in a program that serves a model at the same time."""
    begun, over = threading.Event(), threading.Event()
    other = threading.Thread(target=compiled, args=[lambda: (begun.set(), over.wait())])
    other.start()
    begun.wait()
    try:
        assert main(["serve", "--port", "70000"]) == 2
    finally:
        over.set()
        other.join()
