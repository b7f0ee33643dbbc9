"""Bad records end a job when there are too many of them, and what it has decoded is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from infer.job import shard_decoder
from infer.job.shard_folder import STATS
from tests.infer.job.job_examples import contents, results, run, words, write
from wedlm_jax.errors import BAD_DATA


@pytest.fixture(autouse=True)
def _few_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard_decoder, "FIRST_RECORDS", 10)


BAD = [{"prompt": 5}]


def test_a_limit_ends_a_job_that_another_lets_go_on(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write([*words(3), *BAD, *words(3), *BAD, *words(2), *BAD, *words(9)])
    assert run(model, output="whole") == 0
    assert run(model, "--max-errors", "3", output="three") == 0
    assert run(model, "--max-errors", "2", "--shard-size", "4", output="out") == BAD_DATA
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("wedlm generate: 3 records are bad, more than --max-errors 2, such as ")
    assert "in.jsonl line 11: prompt: expected a text, not 5; " in said
    assert "records are kept in out; the same command continues from there" in said
    assert not Path("out", STATS).exists()
    assert run(model, output="out") == 0
    assert contents("out") == contents("whole")


def test_the_first_records_end_a_job_if_all_are_bad(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write([*BAD * 12, *words(3)])
    assert run(model) == BAD_DATA
    said = capsys.readouterr().err.splitlines()[-1]
    assert "all of the first 10 records are bad, such as in.jsonl line 10: prompt: expec" in said
    assert run(model) == 0, "given again it goes on: the first are kept"
    assert ["error" in record for record in results()] == [True] * 12 + [False] * 3


@pytest.mark.parametrize(
    "options", [["--max-errors", "12"], ["--max-errors", "500"]], ids=["just", "many"]
)
def test_a_limit_lets_the_first_records_be_bad(
    work: Path, model: Path, quick: None, options: list[str]
) -> None:
    write([*BAD * 12, *words(3)])
    assert run(model, *options) == 0


def test_a_good_record_before_them_lets_a_job_go_on(work: Path, model: Path, quick: None) -> None:
    write([*words(1), *BAD * 30])
    assert run(model) == 0


def test_a_job_without_a_good_record_ends_so_each_time(
    work: Path, model: Path, quick: None
) -> None:
    write(BAD * 3)
    for output in ("out.jsonl", "out"):
        assert [run(model, output=output) for _ in range(2)] == [BAD_DATA] * 2
        assert ["error" in record for record in results(output)] == [True] * 3


def test_limits_below_nothing_are_refused(
    work: Path, model: Path, never_decodes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(1))
    assert run(model, "--max-errors", "-1") == 2
    assert "--max-errors: expected 0 or more, not -1" in capsys.readouterr().err
