"""Jobs that begin at once on one output: one gets it, whatever the file system can lock."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import pytest

import infer.job.shard_folder
from infer.job.input import Shard
from infer.job.part_file import InUse
from infer.job.shard_folder import JOB, Identity, ShardFolder
from tests.infer.job.job_examples import read_json, results, run, stop_after, words, write
from wedlm_jax.errors import InputError

ROUNDS = 40
SHARDS = [Shard(0, 0, 2, None)]  # type: ignore[arg-type]


def job(seed: int) -> Identity:
    return Identity("input", "checkpoint", {"seed": seed}, 2, 2)


def claims(barrier: Barrier, told: Connection, folder: str, seed: int, links: bool) -> None:
    """Claims one folder after another, each at the same moment as the other processes do."""

    @contextlib.contextmanager
    def without_locks(_: Path) -> Iterator[None]:
        yield

    def no_link(*_: object) -> None:
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
def test_of_jobs_that_begin_at_once_one_gets_the_folder(
    tmp_path: Path, seeds: list[int], links: bool
) -> None:
    """Without locks, as between hosts on a mounted bucket."""
    context = multiprocessing.get_context("spawn")
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


def test_a_job_that_has_just_begun_keeps_its_folder(
    work: Path,
    model: Path,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Another one comes after the claim and before the first record, as while it compiles."""
    write(words(7))
    begin, other = ShardFolder.open, list[int]()

    def meanwhile(self: ShardFolder, *arguments: Any) -> Any:
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
def test_a_job_that_was_stopped_before_its_first_record_leaves_the_folder(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch, hosts: int
) -> None:
    """Of several hosts, others may be at work."""
    write(words(7))
    with monkeypatch.context() as patch:
        stop_after(0, KeyboardInterrupt(), patch)
        options = ["--num-hosts", str(hosts), "--host-id", "0"]
        assert run(model, *options, output="out") == 130
    assert Path("out").exists() == (hosts > 1)
    assert run(model, "--seed", "5", output="out") == (2 if hosts > 1 else 0)
    assert run(model, "--seed", "5", "--overwrite", output="out") == 0
