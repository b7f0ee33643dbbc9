"""The form of a part file, and when it is on the disk."""

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
