"""`wedlm` in a process of its own that says when it begins to compile a program, and when it has.

Run as a script: FOLDER NAME ARGUMENTS, where NAME is the program's and FOLDER gets the files
``compiling`` and ``compiled``.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax

from wedlm_jax.host.signals import exit_process

LIMIT_S = 300


def command(folder, program, *arguments):
    return ["-m", "tests.examples.interrupted", str(folder), program, *arguments]


def interrupted(folder, program, *arguments, number=signal.SIGINT):
    """Sends the signal while ``program`` is compiled; returns status and standard error."""
    child = subprocess.Popen(
        [sys.executable, *command(folder, program, *arguments)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # None of the compiled programs that are kept between runs.
        env={**os.environ, "XDG_CACHE_HOME": str(folder / "cache")},
    )
    try:
        wait_for_compiler(folder, child)
        child.send_signal(number)
        _, said = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert not (folder / "compiled").exists(), "the command waited for its compiler"
    return child.returncode, said


def wait_for_compiler(folder, child):
    until = time.monotonic() + LIMIT_S
    while not (folder / "compiling").exists():
        assert child.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)
    time.sleep(0.2)  # until it is in C++


def main():
    from wedlm_jax.__main__ import main as wedlm

    folder, program, *arguments = sys.argv[1:]
    compile = jax.stages.Lowered.compile

    def telling(self, *options, **named):
        if f"module @jit_{program} " not in self.as_text()[:1000]:
            return compile(self, *options, **named)
        Path(folder, "compiling").touch()
        done = compile(self, *options, **named)
        Path(folder, "compiled").touch()
        return done

    jax.stages.Lowered.compile = telling
    return wedlm(arguments)


if __name__ == "__main__":
    exit_process(main())
