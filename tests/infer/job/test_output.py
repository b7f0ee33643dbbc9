"""An output file is replaced by its own job alone, or on request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.infer.job.job_examples import run, words, write


def test_a_finished_file_is_kept_from_another_job(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(4))
    assert run(model) == 0
    whole = Path("out.jsonl").read_bytes()
    assert run(model, "--temperature", "0.5") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "out.jsonl: holds finished records of another job (temperature is 0.0 there" in error
    assert error.endswith("choose another output, or delete them with --overwrite")
    assert Path("out.jsonl").read_bytes() == whole
    assert run(model) == 0
    assert "out.jsonl is already complete, with 4 records" in capsys.readouterr().err
    assert run(model, "--temperature", "0.5", "--overwrite") == 0
    assert Path("out.jsonl").read_bytes() != whole


def test_a_file_that_no_job_has_written_is_kept(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(4))
    write([{"prompt": "mine"}], "out.jsonl")
    before = Path("out.jsonl").read_bytes()
    assert run(model) == 2
    assert "out.jsonl: exists, and no job has written it; choose" in capsys.readouterr().err
    assert Path("out.jsonl").read_bytes() == before
    assert not Path("out.jsonl.shards").exists()
    assert run(model, "--overwrite") == 0
    assert Path("out.jsonl").read_bytes() != before
