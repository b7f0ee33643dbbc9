"""Several hosts: who does what, and what becomes of it when they change or meet."""

from __future__ import annotations

import fcntl
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from infer.job.shard_decoder import JobProgress
from infer.job.shard_folder import ShardFolder
from tests.infer.job.job_examples import contents, read_json, results, run, stop_after, words, write


def host(model: Path, number: int, count: int, *options: str, output: str = "out") -> int:
    shape = ["--shard-size", "2", "--num-hosts", str(count), "--host-id", str(number)]
    return run(model, *shape, *options, output=output)


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_the_last_host_ends_the_job(
    work: Path,
    model: Path,
    quick: None,
    decoded: list[Any],
    output: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(words(15))
    assert run(model, output="alone.jsonl") == 0
    decoded.clear()
    for number, records in ((2, 4), (0, 6), (1, 5)):
        before = len(decoded)
        capsys.readouterr()
        assert host(model, number, 3, output=output) == 0
        assert len(decoded) - before == records
    said = capsys.readouterr().err
    assert f"{output}: 15 records" in said
    assert results(output) == results("alone.jsonl")


def test_a_host_says_what_is_left(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(15))
    assert host(model, 1, 3) == 0
    assert capsys.readouterr().err.splitlines()[-1] == (
        "host 1 of 3 has done its share; 5 of 8 shards still unfinished: other processes, or "
        "another run, will decode them"
    )
    assert not Path("out/stats.json").exists()


def test_other_hosts_go_on(
    work: Path, model: Path, quick: None, decoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(words(40))
    assert run(model, output="alone") == 0
    decoded.clear()
    for number in range(4):
        with monkeypatch.context() as patch:
            stop_after(1 + number, KeyboardInterrupt(), patch)
            assert host(model, number, 4) == 130
    for number in range(3):
        assert host(model, number, 3) == 0
    assert [record["id"] for record in results("out")] == list(range(1, 41))
    assert contents("out") == contents("alone")
    assert len(decoded) <= 40 + 4 * 4, "what was kept is not done again"
    assert read_json("out/stats.json")["last_run"]["hosts"] == 3


def test_a_shard_that_another_process_is_at_is_left_to_it(
    work: Path,
    model: Path,
    quick: None,
    decoded: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(words(8))
    with monkeypatch.context() as patch:
        stop_after(1, KeyboardInterrupt(), patch)
        assert run(model, "--shard-size", "4", output="out") == 130
    (part, *_) = sorted(Path("out/parts").glob("*.part"))
    kept = len(decoded)
    with part.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run(model, output="out") == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("this process is done; 1 of 2 shards still unfinished")
    assert run(model, output="out") == 0
    assert [record["id"] for record in results("out")] == list(range(1, 9))
    assert kept + 4 <= len(decoded) <= 12


def test_progress_counts_what_other_processes_finish(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(words(40))
    shown, seal, other = list[int](), ShardFolder.seal, itertools.count()

    def meanwhile(self: ShardFolder, *arguments: Any) -> None:
        seal(self, *arguments)
        if next(other) == 0:
            assert host(model, 1, 2) == 0

    def show(self: JobProgress, *_: Any) -> None:
        if self.total == 40:
            shown.append(self.done)

    monkeypatch.setattr(ShardFolder, "seal", meanwhile)
    monkeypatch.setattr(JobProgress, "show", show)
    assert run(model, "--shard-size", "2", output="out") == 0
    assert shown == sorted(shown)
    assert shown[-1] > 30, "the other has decoded half of them"


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_two_writers_of_one_shard_do_no_harm(
    work: Path, model: Path, quick: None, output: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system without locks: one begins and ends while another is at it."""
    write([*words(7), {"promt": "a"}])
    assert run(model, "--shard-size", "3", output="alone") == 0
    monkeypatch.setattr("infer.job.part_file._lock", lambda file: True)
    seal, depth = ShardFolder.seal, itertools.count()

    def meanwhile(self: ShardFolder, *arguments: Any) -> None:
        if next(depth) == 0:
            assert run(model, "--shard-size", "3", output=output) == 0
            assert results(output) == results("alone")
        seal(self, *arguments)

    monkeypatch.setattr(ShardFolder, "seal", meanwhile)
    assert run(model, "--shard-size", "3", output=output) == 0
    assert results(output) == results("alone")
    assert not [path for path in work.rglob("*") if path.suffix in (".part", ".tmp")]
    if output == "out.jsonl":
        assert sorted(path.name for path in Path("out.jsonl.shards").iterdir()) == [
            "job.json",
            "stats.json",
        ]


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_another_job_that_takes_the_folder_gets_no_rows_of_this_one(
    work: Path,
    model: Path,
    quick: None,
    output: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(words(7))
    assert run(model, "--seed", "5", "--shard-size", "3", output="alone") == 0
    seal, depth = ShardFolder.seal, itertools.count()

    def meanwhile(self: ShardFolder, *arguments: Any) -> None:
        if next(depth) == 1:
            assert run(model, "--seed", "5", "--overwrite", output=output) == 0
        seal(self, *arguments)

    monkeypatch.setattr(ShardFolder, "seal", meanwhile)
    assert run(model, "--shard-size", "3", output=output) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "another job has taken this folder since (seed is 5 there and 0 here)" in said
    assert results(output) == results("alone")


def test_a_shard_of_another_job_is_not_put_into_the_output(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write(words(7))
    assert run(model, "--shard-size", "3", output="out") == 0
    path = Path("out/rows-00001-of-00003.manifest.json")
    manifest = read_json(str(path))
    manifest["job"]["settings"]["params"]["seed"] = 5
    path.write_text(json.dumps(manifest), encoding="utf-8")
    capsys.readouterr()
    assert run(model, output="out") == 2
    assert f"{path}: belongs to another job; remove it" in capsys.readouterr().err
    path.unlink()
    assert run(model, output="out") == 0
