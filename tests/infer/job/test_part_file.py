"""Finished rows survive a process killed at any byte, and only those of the same job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infer.part_file import PartFile
from wedlm_jax.errors import InputError

ROWS: list[dict[str, Any]] = [
    {"id": 0, "text": "naïve\u2028\n"},
    {"id": "b", "text": ', "result": '},
    {"id": 2, "text": None},
]
ORDER = [2, 0, 1]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def start(output: Path, fingerprint: str = "f") -> PartFile:
    return PartFile(output, fingerprint, len(ROWS))


def written(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_rows_come_out_in_order_and_the_part_file_goes(output: Path) -> None:
    part = start(output)
    for number in ORDER:
        part.add({number: ROWS[number]})
        assert not output.exists()
    part.finish()
    assert written(output) == ROWS
    assert [path.name for path in output.parent.iterdir()] == ["out.jsonl"]


def test_every_line_is_json_that_tells_its_row(output: Path) -> None:
    part = start(output)
    part.add({2: ROWS[2], 0: ROWS[0]})
    header, *lines = written(part.path)
    assert header["rows"] == len(ROWS)
    assert lines == [{"row": 2, "result": ROWS[2]}, {"row": 0, "result": ROWS[0]}]
    part.close()


def test_cut_off_at_any_byte(output: Path) -> None:
    part = start(output)
    ends = [part.path.stat().st_size]
    for number in ORDER:
        part.add({number: ROWS[number]})
        ends.append(part.path.stat().st_size)
    part.close()
    whole = part.path.read_bytes()
    assert ends[-1] == len(whole)
    for size in range(len(whole) + 1):
        part.path.write_bytes(whole[:size])
        again = start(output)
        kept = max(sum(end <= size for end in ends) - 1, 0)
        assert again.done == set(ORDER[:kept])
        again.add({number: ROWS[number] for number in ORDER[kept:]})
        again.finish()
        assert written(output) == ROWS


def test_garbage_behind_whole_rows_is_dropped(output: Path) -> None:
    part = start(output)
    part.add({1: ROWS[1]})
    part.close()
    for garbage in (
        b"\0" * 4096,
        b'{"row": 7, "result": {}}\n',
        b'{"row": 0}\n',
        b"[]\n",
        b"\xff\n",
    ):
        with part.path.open("ab") as file:
            file.write(garbage)
        again = start(output)
        assert again.done == {1}
        again.close()
        assert written(part.path)[1:] == [{"row": 1, "result": ROWS[1]}]


def test_rows_of_another_job_are_dropped_and_counted(output: Path) -> None:
    part = start(output, "one job")
    part.add({0: ROWS[0], 1: ROWS[1]})
    part.close()
    other = start(output, "another")
    assert (other.done, other.dropped) == (set(), 2)
    other.close()
    again = start(output, "one job")
    assert (again.done, again.dropped) == (set(), 0)
    again.close()


def test_a_file_of_someone_else_is_left_alone(output: Path) -> None:
    theirs = output.with_name("out.jsonl.part")
    for content in (b"precious\n", b'{"rows": 3}\n', b"no line end"):
        theirs.write_bytes(content)
        with pytest.raises(InputError, match=r"out\.jsonl\.part: not the part file of a job"):
            start(output)
        assert theirs.read_bytes() == content


def test_two_jobs_cannot_write_one_output(output: Path) -> None:
    part = start(output)
    with pytest.raises(InputError, match=r"out\.jsonl\.part: another process is writing it"):
        start(output)
    part.close()
    start(output).close()


def test_unwritable_place_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"out\.jsonl\.part: cannot be written"):
        start(tmp_path / "missing" / "out.jsonl")
