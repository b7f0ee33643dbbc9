"""The folder of a job: whose it is, which hosts work on it, and what happens when they meet."""

import contextlib
import errno
import itertools
import json
import os
import shutil
from pathlib import Path

import pytest

import infer.job.shard_folder
from infer.job.input import Shard
from infer.job.part_file import InUse
from infer.job.shard_decoder import JobProgress
from infer.job.shard_folder import JOB, ShardFolder, folder_digest
from tests.infer.job.job_examples import interrupt, processes, read_json, results, run, words, write
from wedlm_jax.errors import InputError


def test_a_checkpoint_may_be_moved_but_not_changed(model, tmp_path):
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "notes.md").write_text("no part of the model")
    assert folder_digest(copy) == folder_digest(model)
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert folder_digest(copy) != folder_digest(model)


def test_large_checkpoints_are_sampled_to_both_ends(tmp_path, monkeypatch):
    monkeypatch.setattr("infer.job.shard_folder.SAMPLES", 4)
    monkeypatch.setattr("wedlm_jax.host.storage.SAMPLE_BYTES", 8)
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


def claims(barrier, pipe, folder, seed, links):
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
            outcome = "has it"
        except InputError as refused:
            outcome = str(refused)
        except InUse:
            outcome = "has it in use"
        pipe.send(outcome)


@pytest.mark.parametrize("links", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize("seeds", [[1, 2], pytest.param([1, 2, 2, 3], marks=pytest.mark.full)])
def test_of_jobs_that_begin_at_once_one_gets_the_folder(tmp_path, seeds, links):
    """Without locks, as between hosts on a mounted bucket."""
    context = processes()
    barrier = context.Barrier(len(seeds))
    pipes = [context.Pipe(duplex=False) for _ in seeds]
    children = [
        context.Process(
            target=claims, args=(barrier, sender, str(tmp_path), seed, links), daemon=True
        )
        for seed, (_, sender) in zip(seeds, pipes, strict=True)
    ]
    for child in children:
        child.start()
    winners = set()
    for number in range(ROUNDS):
        outcomes = [receiver.recv() if receiver.poll(120) else "nothing" for receiver, _ in pipes]
        owner = read_json(str(tmp_path / str(number) / JOB))["settings"]["seed"]
        winners.add(owner)
        for seed, text in zip(seeds, outcomes, strict=True):
            if seed == owner:
                # The same job on several hosts: one has the shard, the others find it in use.
                assert text.startswith("has it")
            else:
                seeds_differ = f"seed is {owner} there and {seed} here"
                assert f"another job has begun here ({seeds_differ}) and has no records" in text
    for child in children:
        child.join(60)
        assert child.exitcode == 0
    assert len(winners) > 1, "they did begin at once"


# --- what happens in the middle of a job ----------------------------------------------------


@pytest.fixture
def meanwhile(monkeypatch):
    """Lets something happen before one call of a method of the job's folder, or after it."""

    def at(method, act, call=0, *, after=False):
        real, calls = getattr(ShardFolder, method), itertools.count()

        def with_company(self, *arguments):
            now = next(calls) == call
            if now and not after:
                act(self.folder)
            result = real(self, *arguments)
            if now and after:
                act(self.folder)
            return result

        monkeypatch.setattr(ShardFolder, method, with_company)

    return at


OUTPUTS = pytest.mark.parametrize("output", ["out.jsonl", "out"])


@OUTPUTS
@pytest.mark.parametrize("folder_is_removed", [True, False])
def test_a_job_without_records_yet_outlives(
    model, quick, output, folder_is_removed, meanwhile, capsys
):
    """A removed folder, or the same command given once more."""
    write(words(4))
    assert run(model, output="alone") == 0

    def harm(folder):
        if folder_is_removed:
            shutil.rmtree(folder)
        else:
            assert run(model, output=output) == 0
            assert "1 of 1 shard still unfinished" in capsys.readouterr().err

    meanwhile("open", harm, after=True)
    assert run(model, output=output) == 0
    assert results(output) == results("alone")


@OUTPUTS
def test_two_writers_of_one_shard_do_no_harm(work, model, quick, output, meanwhile, monkeypatch):
    """As on a file system without locks: one begins and ends while another is at it."""
    write([*words(7), {"promt": "a"}])
    assert run(model, "--shard-size", "3", output="alone") == 0
    monkeypatch.setattr("infer.job.part_file._lock", lambda file: True)

    def whole_job(_):
        assert run(model, "--shard-size", "3", output=output) == 0
        assert results(output) == results("alone")

    meanwhile("seal", whole_job)
    assert run(model, "--shard-size", "3", output=output) == 0
    assert results(output) == results("alone")
    assert not [path for path in work.rglob("*") if path.suffix in (".part", ".tmp")]
    if output == "out.jsonl":
        assert sorted(os.listdir("out.jsonl.shards")) == ["job.json", "stats.json"]


def test_progress_counts_what_other_processes_finish(model, quick, meanwhile, monkeypatch):
    write(words(40))
    shown = []
    monkeypatch.setattr(
        JobProgress, "show", lambda self, _: shown.append(self.done) if self.total == 40 else None
    )
    meanwhile("seal", lambda _: host(model, 1, 2), after=True)
    assert run(model, "--shard-size", "2", output="out") == 0
    assert shown == sorted(shown)
    assert shown[-1] > 30, "the other has decoded half of them"


# --- hosts ----------------------------------------------------------------------------------


def host(model, number, count, output="out"):
    shape = ["--shard-size", "2", "--num-hosts", str(count), "--host-id", str(number)]
    return run(model, *shape, output=output)


@pytest.mark.parametrize("hosts", [1, 2])
def test_a_job_that_was_stopped_before_its_first_record_leaves_the_folder(model, quick, hosts):
    """Of several hosts, others may be at work."""
    write(words(7))
    options = ["--num-hosts", str(hosts), "--host-id", "0"]
    interrupt(0, model, *options, output="out")
    assert Path("out").exists() == (hosts > 1)
    assert run(model, "--seed", "5", output="out") == (2 if hosts > 1 else 0)
    assert run(model, "--seed", "5", "--overwrite", output="out") == 0


@OUTPUTS
def test_the_last_host_ends_the_job(work, model, quick, decoded, output, capsys):
    write(words(15))
    assert run(model, output="alone") == 0
    alone = results("alone")
    shutil.rmtree("alone")
    decoded.clear()
    for number, records, left in ((2, 4, 6), (0, 6, 3), (1, 5, 0)):
        before = len(decoded)
        capsys.readouterr()
        assert host(model, number, 3, output=output) == 0
        assert len(decoded) - before == records
        printed = capsys.readouterr().err
        share = f"host {number} of 3 has done its share; {left} of 8 shards still unfinished: other"
        assert (share + " processes, or another run, will decode them\n" in printed) == (left > 0)
        assert any(work.rglob("stats.json")) == (left == 0)
    assert f"{output}: 15 records" in printed
    assert results(output) == alone
    (stats,) = work.rglob("stats.json")
    assert read_json(stats)["last_run"]["hosts"] == 3


def test_a_shard_of_another_job_is_not_put_into_the_output(model, quick, refusal):
    write(words(7))
    assert run(model, "--shard-size", "3", output="out") == 0
    path = Path("out/rows-00001-of-00003.manifest.json")
    manifest = read_json(path)
    manifest["job"]["settings"]["params"]["seed"] = 5
    path.write_text(json.dumps(manifest), encoding="utf-8")
    assert f"{path}: belongs to another job; remove it" in refusal(output="out")
    path.unlink()
    assert run(model, output="out") == 0
