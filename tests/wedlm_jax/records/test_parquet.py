"""Rows of Parquet files: any part of them, a few at a time, and without nulls."""

import pytest

from wedlm_jax.records.parquet import (
    ROWS_AT_A_TIME,
    NotParquet,
    column_names,
    read_rows,
    rows_of_groups,
)

pyarrow = pytest.importorskip("pyarrow")


def write(path, rows, group):
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


def test_without_a_wanted_column_the_rows_are_empty(tmp_path):
    path = write(tmp_path / "a.parquet", [{"n": i} for i in range(5)], 2)
    assert list(read_rows(path, "a", ["absent"])) == [{}] * 5
    assert list(read_rows(path, "a", ["absent"], 3, 10)) == [{}] * 2


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
