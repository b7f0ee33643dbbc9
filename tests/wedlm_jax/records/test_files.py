"""Files of records: which are found, in which order, and what is refused."""

import pytest

from wedlm_jax.errors import InputError
from wedlm_jax.records.files import JSONL, PARQUET, file_size, find_files

ENDINGS = {".jsonl": JSONL, ".jsonl.gz": "packed", ".parquet": PARQUET}


def test_folders_are_searched_in_order_and_hidden_files_passed_over(tmp_path):
    for name in ("b/2.jsonl", "a.JSONL", "b/1.jsonl.gz", "b/readme.md", ".cache/c.jsonl", "b/.d"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = find_files([str(tmp_path / "b" / "2.jsonl"), str(tmp_path)], ENDINGS)
    assert [(file.name, file.kind) for file in found.files] == [
        ("b/2.jsonl", JSONL),
        ("a.JSONL", JSONL),
        ("b/1.jsonl.gz", "packed"),
        ("b/2.jsonl", JSONL),
    ]
    assert all(file.shown == str(tmp_path / file.name) for file in found.files)
    assert [path.name for path in found.others] == ["readme.md"]
    assert found.folders == (tmp_path,)


def test_what_cannot_be_input_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "readme.md").write_text("x")
    for name, reason in (
        ("none.jsonl", "none.jsonl: no such file or folder"),
        ("readme.md", r"expected a \.jsonl, \.jsonl\.gz or \.parquet file"),
        ("empty", r"empty: no \.jsonl, \.jsonl\.gz or \.parquet file is in this folder"),
    ):
        with pytest.raises(InputError, match=reason):
            find_files([str(tmp_path / name)], ENDINGS)
    found = find_files([str(tmp_path / "readme.md")], ENDINGS, otherwise=JSONL)
    assert [file.kind for file in found.files] == [JSONL]


def test_parquet_without_pyarrow_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"need pyarrow.*pip install 'wedlm-jax\[data\]'"):
        find_files([str(tmp_path)], ENDINGS)


def test_a_file_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("x")
    (file,) = find_files([str(tmp_path)], ENDINGS).files
    assert file_size(file) == 1
    file.path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read \(No such file"):
        file_size(file)
