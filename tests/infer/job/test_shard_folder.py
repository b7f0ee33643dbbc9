"""The folder of a job: whose it is, which hosts work on it, and what happens when they meet."""

import contextlib
import errno
import fcntl
import itertools
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

import infer.job.shard_folder
from infer.job.input import Shard
from infer.job.part_file import InUse
from infer.job.shard_decoder import JobProgress
from infer.job.shard_folder import JOB, ShardFolder, folder_digest
from tests.infer.job.job_examples import (
    PRELOADED,
    contents,
    interrupt,
    read_json,
    results,
    run,
    stop_after,
    words,
    write,
)
from wedlm_jax.errors import InputError


def test_checkpoint_may_be_moved_but_not_changed(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "notes.md").write_text("no part of the model")
    assert folder_digest(copy) == folder_digest(model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert folder_digest(copy) != folder_digest(model)


def test_large_checkpoints_are_sampled_to_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("infer.job.shard_folder.WHOLE_FILE", 100)
    monkeypatch.setattr("infer.job.shard_folder.SAMPLES", 4)
    monkeypatch.setattr("infer.job.shard_folder.SAMPLE_SIZE", 8)
    path = tmp_path / "model.safetensors"

    def digest(place):
        content = bytearray(101)
        if place is not None:
            content[place] = 1
        path.write_bytes(content)
        return folder_digest(tmp_path)

    seen = [place for place in range(101) if digest(place) != digest(None)]
    assert seen == [*range(8), *range(31, 39), *range(62, 70), *range(93, 101)]


ROUNDS = 40
SHARDS = [Shard(0, 0, 2, None)]  # type: ignore[arg-type]


def job(seed):
    return {
        "input": "input",
        "checkpoint": "checkpoint",
        "settings": {"seed": seed},
        "shard_size": 2,
        "rows": 2,
    }


def claims(barrier, told, folder, seed, links):
    """Claims one folder after another, each at the same moment as the other processes do."""

    @contextlib.contextmanager
    def without_locks(_):
        yield

    def no_link(*_):
        raise OSError(errno.EPERM, "Operation not permitted")

    infer.job.shard_folder.alone = without_locks  # type: ignore[assignment]
    if not links:
        os.link = no_link  # type: ignore[assignment]
    for number in range(ROUNDS):
        barrier.wait()
        try:
            made = ShardFolder(Path(folder) / str(number), job(seed), SHARDS)
            assert made.open(SHARDS[0]) is not None
            said = "has it"
        except InputError as refused:
            said = str(refused)
        except InUse:
            said = "has it in use"
        told.send(said)


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("seeds", [[1, 2], pytest.param([1, 2, 2, 3], marks=pytest.mark.full)])
def test_of_jobs_that_begin_at_once_one_gets_the_folder(tmp_path, seeds, links):
    """Without locks, as between hosts on a mounted bucket."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    barrier = context.Barrier(len(seeds))
    pipes = [context.Pipe(duplex=False) for _ in seeds]
    arguments = [
        (barrier, told, str(tmp_path), seed, links)
        for seed, (_, told) in zip(seeds, pipes, strict=True)
    ]
    children = [context.Process(target=claims, args=given, daemon=True) for given in arguments]
    for child in children:
        child.start()
    winners = set()
    for number in range(ROUNDS):
        said = [heard.recv() if heard.poll(120) else "nothing" for heard, _ in pipes]
        owner = read_json(str(tmp_path / str(number) / JOB))["settings"]["seed"]
        winners.add(owner)
        for seed, text in zip(seeds, said, strict=True):
            if seed == owner:
                # The same job on several hosts: one has the shard, the others find it in use.
                assert text.startswith("has it")
            else:
                assert f"another job has begun here (seed is {owner} there and {seed} here)" in text
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(winners) > 1, "they did begin at once"


def test_a_job_that_has_just_begun_keeps_its_folder(model, quick, monkeypatch, capsys):
    """Another one comes after the claim and before the first record, as while it compiles."""
    write(words(7))
    begin, other = ShardFolder.open, list[int]()

    def meanwhile(self, *arguments):
        if not other:
            other.append(0)
            other[0] = run(model, "--seed", "5", output="out")
        return begin(self, *arguments)

    monkeypatch.setattr(ShardFolder, "open", meanwhile)
    assert run(model, output="out") == 0
    assert other == [2]
    said = capsys.readouterr().err
    assert "out: another job has begun here (seed is 0 there and 5 here), and has no" in said
    assert [record["id"] for record in results("out")] == list(range(1, 8))


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_job_that_was_stopped_before_its_first_record_leaves_the_folder(model, quick, hosts):
    """Of several hosts, others may be at work."""
    write(words(7))
    options = ["--num-hosts", str(hosts), "--host-id", "0"]
    interrupt(0, model, *options, output="out")
    assert Path("out").exists() == (hosts > 1)
    assert run(model, "--seed", "5", output="out") == (2 if hosts > 1 else 0)
    assert run(model, "--seed", "5", "--overwrite", output="out") == 0


def host(model, number, count, *options, output="out"):
    shape = ["--shard-size", "2", "--num-hosts", str(count), "--host-id", str(number)]
    return run(model, *shape, *options, output=output)


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_the_last_host_ends_the_job(work, model, quick, decoded, output, capsys):
    write(words(15))
    assert run(model, output="alone.jsonl") == 0
    alone = results("alone.jsonl")
    shutil.rmtree("alone.jsonl.shards")
    decoded.clear()
    for number, records, left in ((2, 4, 6), (0, 6, 3), (1, 5, 0)):
        before = len(decoded)
        capsys.readouterr()
        assert host(model, number, 3, output=output) == 0
        assert len(decoded) - before == records
        said = capsys.readouterr().err
        told = f"host {number} of 3 has done its share; {left} of 8 shards still unfinished: other "
        assert (told + "processes, or another run, will decode them\n" in said) == (left > 0)
        assert any(work.rglob("stats.json")) == (left == 0)
    assert f"{output}: 15 records" in said
    assert results(output) == alone


def test_other_hosts_go_on(model, quick, decoded, monkeypatch):
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


def test_a_shard_that_another_process_is_at_is_left_to_it(model, quick, decoded, capsys):
    write(words(8))
    interrupt(1, model, "--shard-size", "4", output="out")
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


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
@pytest.mark.parametrize("harm", ["the same command", "a removed folder"])
def test_a_job_without_records_yet_outlives(harm, model, quick, output, monkeypatch, capsys):
    write(words(4))
    assert run(model, output="alone") == 0
    begin, depth = ShardFolder.open, itertools.count()

    def meanwhile(self, *arguments):
        part = begin(self, *arguments)
        if next(depth) == 0:
            if harm == "the same command":
                assert run(model, output=output) == 0
                assert "1 of 1 shard still unfinished" in capsys.readouterr().err
            else:
                shutil.rmtree(self.folder)
        return part

    monkeypatch.setattr(ShardFolder, "open", meanwhile)
    assert run(model, output=output) == 0
    assert results(output) == results("alone")


def test_progress_counts_what_other_processes_finish(model, quick, monkeypatch):
    write(words(40))
    shown, seal, other = list[int](), ShardFolder.seal, itertools.count()

    def meanwhile(self, *arguments):
        seal(self, *arguments)
        if next(other) == 0:
            assert host(model, 1, 2) == 0

    def show(self, *_):
        if self.total == 40:
            shown.append(self.done)

    monkeypatch.setattr(ShardFolder, "seal", meanwhile)
    monkeypatch.setattr(JobProgress, "show", show)
    assert run(model, "--shard-size", "2", output="out") == 0
    assert shown == sorted(shown)
    assert shown[-1] > 30, "the other has decoded half of them"


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_two_writers_of_one_shard_do_no_harm(work, model, quick, output, monkeypatch):
    """As on a file system without locks: one begins and ends while another is at it."""
    write([*words(7), {"promt": "a"}])
    assert run(model, "--shard-size", "3", output="alone") == 0
    monkeypatch.setattr("infer.job.part_file._lock", lambda file: True)
    seal, depth = ShardFolder.seal, itertools.count()

    def meanwhile(self, *arguments):
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
    model, quick, output, monkeypatch, capsys
):
    write(words(7))
    assert run(model, "--seed", "5", "--shard-size", "3", output="alone") == 0
    seal, depth = ShardFolder.seal, itertools.count()

    def meanwhile(self, *arguments):
        if next(depth) == 1:
            assert run(model, "--seed", "5", "--overwrite", output=output) == 0
        seal(self, *arguments)

    monkeypatch.setattr(ShardFolder, "seal", meanwhile)
    assert run(model, "--shard-size", "3", output=output) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "another job has taken this folder since (seed is 5 there and 0 here)" in said
    assert results(output) == results("alone")


def test_a_shard_of_another_job_is_not_put_into_the_output(model, quick, capsys):
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
