"""`wedlm convert` on a full disk: nothing half-written, and the status that says try again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.checkpoints import write_tiny
from tests.examples.full_disk import run_with_small_files, small_disk
from wedlm_jax.__main__ import main
from wedlm_jax.errors import STORAGE_FAILED

OPTIONS = {"hf": ["--to", "hf", "--dtype", "float32"], "orbax": ["--to", "orbax"]}


@pytest.mark.parametrize("to", OPTIONS)
def test_a_full_disk_is_no_bad_input(
    tmp_path: Path, to: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny(tmp_path / "model")
    with small_disk(tmp_path / "disk", 8 * 1024) as disk:
        assert main(["convert", str(source), str(disk / "made"), *OPTIONS[to]]) == STORAGE_FAILED
        said = capsys.readouterr().err.splitlines()[-1]
        assert said.startswith(f"wedlm convert: {disk / 'made'}: cannot be written (")
        assert list(disk.iterdir()) == []


@pytest.mark.full
@pytest.mark.parametrize("to", OPTIONS)
def test_a_file_that_may_not_grow_is_no_bad_input(tmp_path: Path, to: str) -> None:
    source = write_tiny(tmp_path / "model")
    arguments = ["convert", str(source), str(tmp_path / "made"), *OPTIONS[to]]
    ended = run_with_small_files(arguments, 1024)
    assert ended.returncode == STORAGE_FAILED, ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
