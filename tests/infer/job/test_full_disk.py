"""A job whose disk is full ends with the status on which its launcher tries again, and goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.full_disk import run_with_small_files, small_disk
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
