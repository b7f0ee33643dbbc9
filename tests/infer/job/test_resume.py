"""What a stopped or refused job says, what a damaged or another job's output does, and real
processes that are killed; `test_job_machine` has what may happen in any order."""

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from infer.job.part_file import FORMAT
from infer.job.shard_folder import _part_records
from tests.examples.checkpoints import edit_json
from tests.infer.job.job_examples import (
    ask_to_end,
    contents,
    interrupt,
    read_json,
    results,
    run,
    start,
    stop_after,
    words,
    write,
)
from wedlm_jax.generation import Handle
from wedlm_jax.host.progress import Progress
from wedlm_jax.llm import LLM


def kept(records, total=16):
    return f"{records} of {total} records are kept in out.jsonl.shards"


# --- what is said, and what is on the disk --------------------------------------------------


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_a_damaged_shard_is_not_put_into_the_output(model, quick, output, refusal):
    write(words(16))
    interrupt(4, model, "--shard-size", "3", output=output)
    path = sorted(Path(f"{output}.shards").glob("rows-*.jsonl"))[0]
    manifest = path.with_suffix(".manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"id"', b"id", 1))
    assert f"{path}: does not match {manifest.name}" in refusal(output=output)
    assert not Path(output).exists()
    path.unlink()
    manifest.unlink()
    assert run(model, output=output) == 0


CHANGES = [
    ("--max-tokens 23", "max_tokens is 24 there and 23 here"),
    ("--seed 1", "seed is 0 there and 1 here"),
    ("--temperature 1 --n 2", "temperature is 0.0 there and 1.0 here, n is 1 there and 2 here"),
    ("--logprobs 0", "logprobs is None there and 0 here"),
    ("--stop zzz", "stop is [] there and ['zzz'] here"),
    ("--entropy-threshold none", "entropy_threshold is 0.4 there and None here"),
    ("--chat", "chat is False there and True here"),
    ("--dtype bfloat16", "dtype is 'float32' there and 'bfloat16' here"),
    ("--deterministic", "deterministic is False there and True here"),
    ("--mode paper", "mode is 'verified' there and 'paper' here"),
    ("--max-model-len 300", "max_model_len is 320 there and 300 here"),
    ("--window-size 0", "window_size is 4 there and 0 here"),
    ("--window-size auto", "window_size is 4 there and 'auto' here"),
    ("--shard-size 7", "shard_size is 4 there and 7 here"),
    ("--input other.jsonl", "the input differs"),
    ("--model other", "the checkpoint differs"),
    ("", "it was started by another version of wedlm, which counts forwards differently; finish"),
]


def test_another_job_is_refused_until_its_rows_may_go(work, model, quick, capsys):
    write(words(10))
    write([*words(9), {"prompt": "b"}], "other.jsonl")
    other = Path(shutil.copytree(model, work / "other"))
    edit_json(other / "config.json", rope_theta=5e5)
    interrupt(3, model, "--shard-size", "4", output="out")

    def files():
        return {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    def job(change):
        options, given = change.split(), {"input": "in.jsonl"}
        if change.startswith("--input"):
            options, given = [], {"input": options[1]}
        return run(other if "other" in options else model, *options, output="out", **given)

    for change, why in CHANGES:
        if not change:
            job_file = read_json("out/job.json")
            changed = json.dumps(job_file | {"wedlm_generate": FORMAT - 1})
            Path("out/job.json").write_text(changed, encoding="utf-8")
        before = files()
        capsys.readouterr()
        assert job(change) == 2
        error = capsys.readouterr().err
        assert f"records of another job ({why}" in error
        assert error.endswith("; choose another output, or delete them with --overwrite\n")
        assert files() == before
    for _ in range(2):  # the second time it finds its own records
        assert job("--seed 1 --overwrite") == 0
        assert [record["id"] for record in results("out")] == list(range(1, 11))


def test_what_else_ends_a_job_loses_nothing(model, quick, monkeypatch, decoded, refusal):
    write(words(8))
    with monkeypatch.context() as patch:
        stop_after(1, RuntimeError("RESOURCE_EXHAUSTED: out of memory"), patch)
        error = refusal()
    smaller = "too little memory for 4 sequences at a time; try a smaller --batch-size"
    assert error.endswith(f"{smaller}; {kept(2, 8)}")
    with monkeypatch.context() as patch:
        stop_after(1, RuntimeError("a fault"), patch)
        with pytest.raises(RuntimeError, match="a fault"):
            run(model)
    decoded.clear()
    assert run(model) == 0
    assert 0 < len(decoded) < 6
    assert [record["id"] for record in results()] == list(range(1, 9))


# --- SIGTERM --------------------------------------------------------------------------------


@pytest.mark.full
def test_sigterm_keeps_no_prompt_that_lacks_samples(model, monkeypatch, capsys):
    # Forty samples are more than the engine has taken when the first of them is done.
    write([{"prompt": "mat"}, {"prompt": "a"}])
    options = ("--n", "40", "--temperature", "1", "--logprobs", "2")
    assert run(model, *options, output="whole.jsonl") == 0
    end = Handle._end
    with monkeypatch.context() as patch:
        asked = []

        def asked_to_end(self, sample):
            if not asked:
                ask_to_end()
            asked.append(sample)
            end(self, sample)

        patch.setattr(Handle, "_end", asked_to_end)
        assert run(model, *options) == 143
        assert 1 <= len(asked) <= 4, "nothing is decoded that comes to nothing"
    assert f"stopped by SIGTERM: {kept(0, 2)}; " in capsys.readouterr().err
    assert run(model, *options) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert [len(record["samples"]) for record in results()] == [40, 40]


def test_sigterm_waits_no_longer_than_its_grace(quick, monkeypatch, refusal):
    write(words(16))
    quick_run = LLM.run

    def slow(self, records, on_progress, **_):
        yield next(quick_run(self, records, on_progress))
        ask_to_end()
        while True:  # forwards of sequences that do not end
            on_progress(Progress(2, None, 40, 20, 80))

    monkeypatch.setattr(LLM, "run", slow)
    assert f"stopped by SIGTERM: {kept(2)}; " in refusal("--grace", "0.2", status=143)


def test_sigterm_before_anything_is_decoded(model, monkeypatch, capsys):
    write(words(2))
    monkeypatch.setattr("infer.job.job.build_index", lambda *_: ask_to_end())
    assert run(model) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM: nothing was decoded yet\n"
    assert os.listdir() == ["in.jsonl"]


@pytest.mark.full
def test_replicas_change_no_row(model):
    records = words(8)
    records[2] = {"prompt": "12 + 30 = " * 20}
    write(records)
    assert run(model) == 0
    assert run(model, "--mesh", "data=2", output="replicas.jsonl") == 0
    assert Path("replicas.jsonl").read_bytes() == Path("out.jsonl").read_bytes()


# --- real processes -------------------------------------------------------------------------

NO_DRAFTS = ("--window-size", "0", "--max-tokens", "16", "--shard-size", "20")
LIMIT_S = 120


def kept_records():
    """Rows in finished shards and in parts."""
    parts = _part_records(Path("out/parts"))  # read first: a part becomes a shard
    manifests = Path("out").glob("rows-*.manifest.json")
    shards = {path.name.split(".")[0]: read_json(path)["counts"]["rows"] for path in manifests}
    return sum((parts | shards).values())


def wait_for_records(child, records):
    deadline = time.monotonic() + LIMIT_S
    while kept_records() < records:
        assert child.is_alive(), Path("printed.txt").read_text()
        assert time.monotonic() < deadline, Path("printed.txt").read_text()
        time.sleep(0.01)


@pytest.mark.full
def test_a_job_killed_again_and_again_is_the_job_that_was_never_killed(model):
    kills, rows = 10, 500
    drawn = [{**one, "sampling": {"temperature": 1.0}} for one in words(rows)]
    drawn[::25] = [{"prompt": 5}] * (rows // 25)
    write([{"id": f"row {i}", **one} for i, one in enumerate(drawn)])
    assert run(model, *NO_DRAFTS, output="unbroken") == 0
    moments = random.Random(0)
    reached = []
    for records in sorted(moments.sample(range(rows * 3 // 4), kills)):
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
    assert contents("out") == contents("unbroken")
    assert not list(Path("out").glob("**/*.part"))
