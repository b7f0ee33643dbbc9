"""`wedlm tokenize` on a full disk, and on an input that cannot be reached."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

import train.data.chunks
from tests.examples.data import EMBEDDED, documents, write_jsonl
from tests.examples.full_disk import run_with_small_files, small_disk
from wedlm_jax.__main__ import main
from wedlm_jax.errors import STORAGE_FAILED


def command(source: Path, output: Path) -> list[str]:
    files = ["--input", str(source), "--output", str(output), "--tokenizer", str(EMBEDDED)]
    return ["tokenize", *files, "--row-length", "128"]


@pytest.mark.full
def test_a_full_disk_is_no_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents(3000))
    with small_disk(tmp_path / "disk", 64 * 1024) as disk:
        assert main(command(source, disk / "rows")) == STORAGE_FAILED
        assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
        assert not (disk / "rows").exists()


@pytest.mark.full
def test_a_file_that_may_not_grow_is_no_bad_input(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents(3000))
    ended = run_with_small_files(command(source, tmp_path / "rows"), 16 * 1024)
    assert ended.returncode == STORAGE_FAILED, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("wedlm tokenize: ")
    assert main(command(source, tmp_path / "rows")) == 0


def test_records_that_cannot_be_reached_are_not_malformed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", documents(10))
    read_lines = train.data.chunks.read_lines

    def failing(stream: object) -> object:
        for number, line in enumerate(read_lines(stream)):
            if number == 5:
                raise OSError(errno.EIO, "Input/output error")
            yield line

    monkeypatch.setattr(train.data.chunks, "read_lines", failing)
    assert main(command(source, tmp_path / "rows")) == STORAGE_FAILED
    said = capsys.readouterr().err
    assert f"wedlm tokenize: {source}: cannot be read (Input/output error)" in said
    assert not (tmp_path / "rows").exists()
