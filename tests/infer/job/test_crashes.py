"""Processes that end without a word, at any moment: no finished record is lost, none repeated."""

import itertools
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from infer.job.part_file import PartFile, whole_records
from tests.infer.job.job_examples import contents, results, run, start, words, write

ROWS = 200
NO_DRAFTS = ("--window-size", "0", "--max-tokens", "16", "--shard-size", "20")
LIMIT_S = 120


class Killed(BaseException):
    """In the place of SIGKILL."""


def die_at(operation, monkeypatch):
    """The process touches no file any more once it comes to this one of its writing operations,
    counted from 0; appending a record is cut in the middle. Returns what it did before."""
    done = []

    def patched(name, real, half):
        def call(*arguments, **options):
            if len(done) == operation:
                if half is not None:
                    half(*arguments)
                done.append("death")
            if done and done[-1] == "death":
                raise Killed
            done.append(name)
            return real(*arguments, **options)

        return call

    def half_a_row(self, number, text):
        self._file.write(b'{"row": %d, "result": ' % number + text[: len(text) // 2])
        self._file.flush()

    for owner, name, half in (
        (os, "replace", None),
        (os, "fsync", None),
        (Path, "unlink", None),
        (Path, "mkdir", None),
        (PartFile, "_append", half_a_row),
    ):
        monkeypatch.setattr(owner, name, patched(name, getattr(owner, name), half))
    return done


@pytest.mark.parametrize("output", ["out.jsonl", pytest.param("out", marks=pytest.mark.full)])
def test_death_at_any_operation_is_made_good(model, quick, output, decoded, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # a disk takes long for it
    opened = []
    opening = Path.open

    def noting(self, *arguments, **options):
        file = opening(self, *arguments, **options)
        if self.suffix == ".part":
            opened.append(file)
        return file

    monkeypatch.setattr(Path, "open", noting)
    write([*words(5), {"promt": "a"}, *words(4)])

    def job():
        return run(model, "--shard-size", "4", output=output)

    def whole():
        return Path(output).read_bytes() if output == "out.jsonl" else contents(output)

    assert job() == 0
    expected, deaths = whole(), 0
    for operation in itertools.count():
        for path in (Path(output), Path(f"{output}.shards")):
            shutil.rmtree(path, ignore_errors=True)
            path.unlink(missing_ok=True)
        decoded.clear()
        with pytest.MonkeyPatch.context() as patch:
            done = die_at(operation, patch)
            try:
                status = job()
            except Killed:
                status = -signal.SIGKILL
        for part in opened:  # as the end of a process does
            part.close()
        opened.clear()
        if status == 0:
            assert "death" not in done
            break
        deaths += 1
        assert status == -signal.SIGKILL
        before = len(decoded)
        assert job() == 0
        assert whole() == expected
        assert len(decoded) - before <= 9, "records that were decoded before may be decoded again"
        if "_append" in done[:-2]:
            assert len(decoded) <= 9 + 4, "but no more than were under way"
    assert deaths > 30
    assert {"replace", "fsync", "unlink", "mkdir", "_append"} <= set(done)


# --- real processes ----------------------------------------------------------------------


def kept_records(output="out"):
    """Rows in finished shards and in parts."""
    finished = sum(
        path.read_bytes().count(b"\n")
        for path in Path(output).glob("rows-*.jsonl")
        if path.with_suffix(".manifest.json").exists()
    )
    numbers = set()
    for path in Path(output).glob("parts/*.part"):
        if not Path(output, path.name.partition(".")[0] + ".manifest.json").exists():
            try:
                with path.open("rb") as file:
                    file.readline()
                    numbers.update(number for number, _ in whole_records(file))
            except FileNotFoundError:
                pass  # has become a shard
    return finished + len(numbers)


def wait_for_records(child, records):
    deadline = time.monotonic() + LIMIT_S
    while kept_records() < records:
        assert child.is_alive(), Path("said.txt").read_text()
        assert time.monotonic() < deadline, Path("said.txt").read_text()
        time.sleep(0.01)


def mixed(count):
    """Rows that sample, and some that cannot be decoded."""
    return [
        {"id": f"row {i}", **record, "sampling": {"temperature": 1.0}}
        if i % 25
        else {"id": f"row {i}", "prompt": 5}
        for i, record in enumerate(words(count))
    ]


@pytest.mark.full
def test_a_job_killed_again_and_again_is_the_job_that_was_never_killed(model):
    kills, rows = 10, 500
    write(mixed(rows))
    assert run(model, *NO_DRAFTS, output="unbroken") == 0
    moments = random.Random(0)
    targets = sorted(moments.sample(range(rows * 3 // 4), kills))
    reached = []
    for records in targets:
        child = start(model, *NO_DRAFTS)
        wait_for_records(child, records)
        time.sleep(moments.uniform(0, 0.05))
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
        reached.append(kept_records())
    assert reached == sorted(reached), "what was kept once stays"
    assert 0 < reached[-1] < rows
    assert run(model, *NO_DRAFTS, "--batch-size", "16", output="out") == 0
    ids = [record["id"] for record in results("out")]
    assert len(ids) == len(set(ids)) == rows
    assert contents("out") == contents("unbroken")
    assert not list(Path("out").glob("**/*.part"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("number", "status", "word"),
    [(signal.SIGTERM, 143, "stopped by SIGTERM"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_job_that_is_asked_to_end_says_how_to_go_on(model, number, status, word):
    write(words(ROWS))
    child = start(model, *NO_DRAFTS)
    wait_for_records(child, 20)
    assert child.pid is not None
    os.kill(child.pid, number)
    child.join(LIMIT_S)
    assert child.exitcode == status, Path("said.txt").read_text()
    records = kept_records()
    assert 20 <= records < ROWS
    last = Path("said.txt").read_text().splitlines()[-1]
    kept = f"{records} of {ROWS} records are kept in out"
    assert last == f"{word}: {kept}; the same command continues from there"
