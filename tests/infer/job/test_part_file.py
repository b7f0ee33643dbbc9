"""Finished records survive a process killed at any byte, and only those of the same shard."""

import json
import resource
import time

from infer.job import part_file
from infer.job.part_file import FORMAT, PartFile

FIRST = 10
ROWS = {
    10: {"id": 0, "text": "naïve\u2028\n"},
    11: {"id": "b", "text": ', "result": '},
    12: {"id": 2, "text": None},
}
ORDER = [12, 10, 11]


def start(folder, job="f", name="rows-00001-of-00002"):
    return PartFile(folder, name, {"job": job, "shard": 1}, range(FIRST, FIRST + len(ROWS)))


def add(part, *numbers):
    for number in numbers:
        part.add(number, ROWS[number])


def parts(folder):
    return sorted(folder.iterdir())


def entries(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_every_line_is_json_that_tells_its_row_and_rows_come_out_in_order(tmp_path):
    part = start(tmp_path)
    add(part, 12, 10)
    header, *lines = entries(part.path)
    assert header == {"wedlm_generate": FORMAT, "job": "f", "shard": 1}
    assert lines == [{"row": 12, "result": ROWS[12]}, {"row": 10, "result": ROWS[10]}]
    assert not part.is_whole
    assert json.loads(next(part.lines())) == ROWS[10], "more may be added after it was read"
    add(part, 11)
    assert part.is_whole
    for _ in range(2):
        assert [json.loads(line) for line in part.lines()] == list(ROWS.values())
    part.remove()
    assert not parts(tmp_path)


def test_cut_off_at_any_byte(tmp_path):
    part = start(tmp_path)
    ends = [part.path.stat().st_size]
    for number in ORDER:
        add(part, number)
        ends.append(part.path.stat().st_size)
    part.close()
    whole = part.path.read_bytes()
    part.path.unlink()
    assert ends[-1] == len(whole)
    for size in range(len(whole) + 1):
        (tmp_path / "rows-00001-of-00002.of-another-process.part").write_bytes(whole[:size])
        again = start(tmp_path)
        kept = max(sum(end <= size for end in ends) - 1, 0)
        assert again.done == set(ORDER[:kept])
        assert parts(tmp_path) == [again.path], "what was taken over is gone"
        add(again, *ORDER[kept:])
        assert [json.loads(line) for line in again.lines()] == list(ROWS.values())
        again.remove()


GARBAGE = (b"\0" * 4096, b'{"row": 70, "result": {}}\n', b'{"row": 10}\n', b"[]\n", b"\xff\n")


def test_garbage_behind_whole_rows_is_dropped(tmp_path):
    for garbage in (*GARBAGE, b'{"ro'):
        part = start(tmp_path)
        add(part, 11)
        part.close()
        with part.path.open("ab") as file:
            file.write(garbage)
        again = start(tmp_path)
        assert again.done == {11}
        again.close()
        assert entries(again.path)[1:] == [{"row": 11, "result": ROWS[11]}]
        again.remove()


def test_several_that_were_left_are_taken_together(tmp_path):
    for k, numbers in enumerate(([10, 12], [12], [11, 10])):
        (tmp_path / str(k)).mkdir()
        part = start(tmp_path / str(k))
        add(part, *numbers)
        part.close()
        part.path.rename(tmp_path / part.path.name)
    assert len(list(tmp_path.glob("*.part"))) == 3
    again = start(tmp_path)
    assert [json.loads(line) for line in again.lines()] == list(ROWS.values())
    assert list(tmp_path.glob("*.part")) == [again.path]
    again.remove()


def test_rows_of_another_shard_or_job_are_not_taken(tmp_path):
    other = start(tmp_path, name="rows-00000-of-00002")
    add(other, 10)
    other.close()
    stranger = start(tmp_path, job="another")
    add(stranger, 11)
    stranger.close()
    part = start(tmp_path)
    assert part.done == set()
    part.close()
    assert other.path.exists()


def test_what_was_added_is_on_the_disk_before_long(tmp_path, monkeypatch):
    now, synced = 100.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    part = start(tmp_path)
    monkeypatch.setattr(part_file, "sync", lambda file: synced.append(now))
    for number in ORDER:
        now += part_file.SYNC_SECONDS * 0.6
        add(part, number)
        assert part.path.read_bytes().endswith(b"}}\n"), "no end of the process loses it"
    assert synced == [100.0 + part_file.SYNC_SECONDS * 1.2]
    part.remove()


def test_as_many_files_may_be_open_as_the_system_allows():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        part_file.allow_open_files()
        now = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert now == (min(part_file.OPEN_FILES, hard), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
