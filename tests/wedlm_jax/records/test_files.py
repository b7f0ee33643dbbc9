"""Files of records: which are found; lines with their places, and the objects in them; any rows of
Parquet files."""

import hashlib
import io

import pytest

from wedlm_jax.errors import InputError
from wedlm_jax.records import jsonl
from wedlm_jax.records.files import JSONL, PARQUET, file_size, find_files
from wedlm_jax.records.jsonl import BadRecord, Line, parse_object, read_lines
from wedlm_jax.records.parquet import (
    ROWS_AT_A_TIME,
    NotParquet,
    column_names,
    read_rows,
    rows_of_groups,
)

CONTENT = b'\xef\xbb\xbf{"a": 1}\n\n  \t\n{"b": "\xc3\xa9"}\r\n{"c": 3}'


def test_lines_have_their_places_and_blank_ones_are_left_out():
    lines = list(read_lines(io.BytesIO(CONTENT)))
    assert lines == [
        Line(0, 1, b'{"a": 1}\n'),
        Line(17, 4, b'{"b": "\xc3\xa9"}\r\n'),
        Line(30, 5, b'{"c": 3}'),
    ]


def test_reading_goes_on_from_any_place():
    lines = list(read_lines(io.BytesIO(CONTENT)))
    for first, line in enumerate(lines):
        stream = io.BytesIO(CONTENT)
        stream.seek(line.at)
        assert list(read_lines(stream, line.at, line.number)) == lines[first:]


@pytest.mark.parametrize("longest", [5, 9, 10, 1000])
def test_a_line_that_is_too_long_is_read_past_and_the_digest_has_every_byte(longest, monkeypatch):
    monkeypatch.setattr(jsonl, "LARGEST_LINE", longest)
    content = b"short\n" + b"x" * 9 + b"\n" + b"y" * 300 + b"\nz"
    digest = hashlib.sha256()
    lines = list(read_lines(io.BytesIO(content), digest=digest))
    assert digest.digest() == hashlib.sha256(content).digest()
    whole = content.splitlines(keepends=True)
    assert [line.content for line in lines] == [
        line if len(line) <= longest else None for line in whole
    ]
    assert [line.at for line in lines] == [0, 6, 16, 317]


@pytest.mark.parametrize(
    ("line", "value"),
    [
        (b'  {"a": [1, {"b": null}]} \r\n', {"a": [1, {"b": None}]}),
        ('{"é": "日本"}'.encode(), {"é": "日本"}),
        (b'{"a": "\\ud83d\\ude00 \\\\ud800"}', {"a": "😀 \\ud800"}),
        (b'{"a": {"x": 1}, "b": {"x": 1}}', {"a": {"x": 1}, "b": {"x": 1}}),
        (b'{"big": 123456789012345678901234567890}', {"big": 123456789012345678901234567890}),
    ],
)
def test_objects_are_read(line, value):
    assert parse_object(line) == value


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (None, "too long", "more than 32 MiB in a line"),
        (b'{"a": 1', "not JSON", "Expecting ',' delimiter at column 8"),
        (b'{"a": 1} {"b": 2}', "not JSON", "Extra data at column 10"),
        (b'{"a": "b', "not JSON", "Unterminated string starting at column 7"),
        (b'{"a": NaN}', "not JSON", "NaN is not a JSON number"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "not JSON", "duplicate key 'c'"),
        (b"[" * 100_000, "not JSON", "maximum recursion depth exceeded"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not JSON", "Exceeds the limit"),
        (b"[1, 2]", "not a JSON object", "[1, 2]"),
        (b'"' + b"x" * 100 + b'"', "not a JSON object", '"' + "x" * 56 + "..."),
        (b'{"a": "\xff"}', "not UTF-8", "byte 7; another encoding or binary"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8", "UTF-16 or binary data"),
        (b'{"a": "\0"}', "not UTF-8", "UTF-16 or binary data"),
        (b'{"a": "\\ud83d"}', "not UTF-8", "half of a surrogate pair, \\ud800 to \\udfff"),
        (b'{"\\uDC00": 1}', "not UTF-8", "half of a surrogate pair, \\ud800 to \\udfff"),
    ],
)
def test_bad_records_have_a_reason_to_count_by(line, reason, detail):
    with pytest.raises(BadRecord) as refused:
        parse_object(line)
    assert refused.value.reason == reason
    assert refused.value.detail.startswith(detail)
    assert str(refused.value) == f"{reason} ({refused.value.detail})"
    assert len(str(refused.value)) < 300


# --- which files are found ---------------------------------------------------------------


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
    either = r"\.jsonl, \.jsonl\.gz or \.parquet file"
    for name, reason in (
        ("none.jsonl", "none.jsonl: no such file or folder"),
        ("readme.md", f"expected a {either}"),
        ("empty", f"empty: no {either} is in this folder"),
    ):
        with pytest.raises(InputError, match=reason):
            find_files([str(tmp_path / name)], ENDINGS)
    found = find_files([str(tmp_path / "readme.md")], ENDINGS, otherwise=JSONL)
    assert [file.kind for file in found.files] == [JSONL]


def test_parquet_without_pyarrow_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match=r"needs pyarrow, .* pip install \"wedlm-jax\[data\]"):
        find_files([str(tmp_path)], ENDINGS)


def test_a_file_that_is_gone_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text("x")
    (file,) = find_files([str(tmp_path)], ENDINGS).files
    assert file_size(file) == 1
    file.path.unlink()
    with pytest.raises(InputError, match=r"a\.jsonl: cannot be read \(No such file"):
        file_size(file)


# --- Parquet -----------------------------------------------------------------------------


def write(path, rows, group):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    keys = dict.fromkeys(key for row in rows for key in row)
    table = pyarrow.table({key: [row.get(key) for row in rows] for key in keys})
    parquet.write_table(table, path, row_group_size=group)
    return path


def test_any_part_of_the_rows_is_read_whatever_the_row_groups(tmp_path):
    count = 2 * ROWS_AT_A_TIME + 10
    for group in (7, ROWS_AT_A_TIME, count):
        path = write(tmp_path / "a.parquet", [{"n": i, "m": 0} for i in range(count)], group)
        assert sum(rows_of_groups(path, "a")) == count
        assert column_names(path, "a") == ["n", "m"]
        near = (0, 1, group - 1, ROWS_AT_A_TIME - 1, ROWS_AT_A_TIME, count - 1, count)
        for start in near:
            for number in (None, 0, 1, group, count):
                rows = list(read_rows(path, "a", ["n", "absent"], start, number))
                stop = count if number is None else min(start + number, count)
                assert rows == [{"n": i} for i in range(start, stop)], (group, start, number)
                # Without a wanted column they are empty.
                assert list(read_rows(path, "a", ["absent"], start, number)) == [{}] * len(rows)


def test_nulls_are_left_out_however_deep(tmp_path):
    rows = [
        {"a": {"x": {"y": 1}}, "list": [{"k": 1}, {"k": None, "l": 2}]},
        {"a": {"x": {"y": None}, "z": 3}, "list": [None]},
        {"a": None, "list": []},
        {"a": {"x": None}, "list": None},
    ]
    path = write(tmp_path / "a.parquet", rows, 2)
    assert list(read_rows(path, "a", ["a", "list"])) == [
        {"a": {"x": {"y": 1}}, "list": [{"k": 1}, {"l": 2}]},
        {"a": {"z": 3}, "list": [None]},
        {"list": []},
        {},
    ]


@pytest.mark.parametrize("content", [b"PAR1 no more", b"", b"x" * 100])
def test_a_damaged_file_is_named(tmp_path, content):
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    path.write_bytes(content)
    for read in (column_names, rows_of_groups, lambda *names: list(read_rows(*names, ["a"]))):
        with pytest.raises(NotParquet, match=r"^in/a\.parquet: cannot be read as Parquet \("):
            read(path, "in/a.parquet")


def test_rows_that_are_damaged_are_found_when_they_are_read(tmp_path):
    path = write(tmp_path / "a.parquet", [{"n": str(i) * 50} for i in range(300)], 100)
    whole = bytearray(path.read_bytes())
    whole[200:400] = b"\xff" * 200
    path.write_bytes(whole)
    assert rows_of_groups(path, "a") == [100, 100, 100]
    with pytest.raises(NotParquet):
        list(read_rows(path, "a", ["n"]))
