"""A job whose disk is full ends with the status on which its launcher tries again, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.full_disk import make_read_only, run_with_small_files, small_disk
from tests.infer.job.job_examples import SHAPE, contents, run, words, write
from wedlm_jax.errors import STORAGE_FAILED

QUICK = """
from tests.infer.job.quick_decoder import quick_run
from wedlm_jax.llm import LLM
LLM.run = quick_run
"""


@pytest.mark.parametrize("output", ["out", "out.jsonl"])
def test_a_job_goes_on_when_there_is_room_again(
    work: Path, model: Path, quick: None, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(400))
    assert run(model, output="alone") == 0
    with small_disk(work / "disk", 64 * 1024) as disk:
        where = str(disk / output)
        capsys.readouterr()
        assert run(model, output=where) == STORAGE_FAILED
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"wedlm generate: {where}")
        assert "cannot be written (No space left on device)" in said
        kept = list(disk.glob("*/parts/*.part"))
        assert kept, "what was decoded stays"


@pytest.mark.full
def test_a_file_that_may_not_grow_is_no_bad_input(work: Path, model: Path, quick: None) -> None:
    write(words(400))
    arguments = ["generate", "--model", str(model), "--input", "in.jsonl", "--output", "out"]
    ended = run_with_small_files([*arguments, *SHAPE], 32 * 1024, setup=QUICK)
    assert ended.returncode == STORAGE_FAILED, ended.stderr
    assert ended.stderr.splitlines()[-1].endswith("cannot be written (File too large)")
    assert run(model, output="out") == 0
    assert run(model, output="alone") == 0
    assert contents("out") == contents("alone")


@pytest.mark.parametrize("output", ["out", "out.jsonl", "out.parquet"])
def test_a_finished_job_is_finished_on_a_disk_that_is_read_only(
    work: Path, model: Path, quick: None, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(5))
    with small_disk(work / "disk", 2**20) as disk:
        where = str(disk / output)
        assert run(model, "--shard-size", "2", output=where) == 0
        make_read_only(disk)
        capsys.readouterr()
        assert run(model, "--shard-size", "2", output=where) == 0
        said = capsys.readouterr().err.splitlines()
        assert said == [f"{where} is already complete, with 5 records"]
        assert run(model, "--seed", "1", output=where) == 2
        assert " of another job (seed is 0 there and 1 here)" in capsys.readouterr().err
        assert run(model, output=str(disk / "new")) == 2
        assert "cannot be written (Read-only file system)" in capsys.readouterr().err
