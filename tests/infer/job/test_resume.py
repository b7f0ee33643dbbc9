"""Jobs that are stopped and given again, in this process: nothing is lost, nothing done twice."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from infer.job.part_file import FORMAT, PartFile
from tests.infer.job.job_examples import (
    contents,
    interrupt,
    read_json,
    results,
    run,
    stop_after,
    words,
    write,
)
from wedlm_jax.generation import Handle
from wedlm_jax.host.progress import Progress
from wedlm_jax.llm import LLM


def kept(records, total=16):
    return f"{records} of {total} records are kept in out.jsonl.shards"


@pytest.mark.parametrize("shard_size", ["3", "1000"])
def test_interrupted_job_goes_on(model, quick, decoded, shard_size, capsys):
    write(words(16))
    shape = ("--shard-size", shard_size)
    assert run(model, *shape) == 0
    whole = Path("out.jsonl").read_bytes()
    assert len(decoded) == 16
    write([{"prompt": "of before"}], "out.jsonl")
    shutil.rmtree("out.jsonl.shards")
    before = Path("out.jsonl").read_bytes()
    capsys.readouterr()
    interrupt(3, model, *shape, "--overwrite")
    said = capsys.readouterr().err.splitlines()[-1]
    records = int(said.split()[1])
    assert 0 < records < 16
    assert said == f"interrupted: {kept(records)}; the same command continues from there"
    assert Path("out.jsonl").read_bytes() == before, (
        "an earlier output stays until the new is whole"
    )
    decoded.clear()
    assert not Path("out.jsonl.shards/stats.json").exists()
    # Neither of these makes another job, and the size of shards is that of the job that is there.
    assert run(model, "--batch-size", "1", "--overwrite", "--num-hosts", "1") == 0
    assert len(decoded) == 16 - records
    assert Path("out.jsonl").read_bytes() == whole
    said = capsys.readouterr().err
    assert said.splitlines()[0] == f"resuming: {kept(records)}"
    assert f"\nout.jsonl: 16 records ({records} from earlier runs), " in said
    stats = read_json("out.jsonl.shards/stats.json")
    assert (stats["rows"], stats["last_run"]["rows"]) == (16, 16 - records)
    assert stats["tokens"] == sum(len(record["token_ids"]) for record in results())


def test_rows_of_another_version_are_refused_until_they_may_go(model, quick, capsys):
    write(words(8))
    interrupt(1, model)
    path = Path("out.jsonl.shards/job.json")
    job = read_json(str(path))
    path.write_text(json.dumps(job | {"wedlm_generate": FORMAT - 1}), encoding="utf-8")
    capsys.readouterr()
    assert run(model) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "holds 2 records of another job (it was started by another version of wedlm" in said
    assert said.endswith("choose another output, or delete them with --overwrite")
    assert run(model, "--overwrite") == 0
    assert [record["id"] for record in results()] == list(range(1, 9))


@pytest.mark.parametrize("output", ["out.jsonl", "out"])
def test_a_finished_job_is_not_done_again(model, quick, decoded, output, capsys):
    write(words(8))
    assert run(model, "--shard-size", "3", output=output) == 0
    before = {path: path.read_bytes() for path in Path().rglob("rows-*")}
    whole = results(output)
    decoded.clear()
    capsys.readouterr()
    left = Path("out.jsonl.shards/rows-00001-of-00003.jsonl")
    if output == "out.jsonl":
        left.write_bytes(b"")  # as where the end was cut short
    assert run(model, output=output) == 0
    assert not decoded
    assert not left.exists()
    assert results(output) == whole
    assert {path: path.read_bytes() for path in Path().rglob("rows-*")} == before
    if output == "out.jsonl":
        assert capsys.readouterr().err == "out.jsonl is already complete, with 8 records\n"
        Path(output).unlink()
        assert run(model, output=output) == 0
        assert len(decoded) == 8, "what was removed is made anew"
        assert results(output) == whole


def test_a_shard_that_was_removed_is_made_anew(model, quick, decoded):
    write(words(8))
    assert run(model, "--shard-size", "3", output="out") == 0
    whole = contents("out")
    Path("out/rows-00001-of-00003.jsonl").unlink()
    Path("out/rows-00002-of-00003.manifest.json").unlink()
    decoded.clear()
    assert run(model, output="out") == 0
    assert len(decoded) == 5
    assert contents("out") == whole


@pytest.mark.parametrize("output", ["out.jsonl", "out.parquet"])
def test_a_damaged_shard_is_not_put_into_the_output(model, quick, output, capsys):
    write(words(16))
    interrupt(4, model, "--shard-size", "3", output=output)
    path = sorted(Path(f"{output}.shards").glob("rows-*.jsonl"))[0]
    manifest = path.with_suffix(".manifest.json")
    path.write_bytes(path.read_bytes().replace(b'"id"', b"id", 1))
    capsys.readouterr()
    assert run(model, output=output) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"{path}: does not match {manifest.name}" in error
    assert not Path(output).exists()
    path.unlink()
    manifest.unlink()
    assert run(model, output=output) == 0
    if output == "out.jsonl":
        assert [record["id"] for record in results()] == list(range(1, 17))


def test_results_of_every_form_are_the_same_after_an_interruption(model, quick, decoded):
    several = [
        {**record, "sampling": {"n": 1 + i % 3}, "own": i} for i, record in enumerate(words(16))
    ]
    body = {"model": "any", "prompt": "a", "temperature": 1, "max_tokens": 9}
    requests = [{"custom_id": f"q{i}", "url": "/v1/completions", "body": body} for i in range(5)]
    write([*several, {"prompt": "a", "sampling": {"n": -1}}, *requests])
    options = ("--temperature", "1", "--logprobs", "3", "--shard-size", "4")
    assert run(model, *options, output="whole.jsonl") == 0
    decoded.clear()
    interrupt(7, model, *options)
    assert run(model, *options, "--batch-size", "3") == 0
    assert len(decoded) <= 16 + 5 + 4, "a prompt's samples are kept together"
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    ours, theirs = (read_json(f"{name}.jsonl.shards/stats.json") for name in ("out", "whole"))
    for stats in (ours, theirs):
        del stats["last_run"], stats["output"]
    assert ours == theirs


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
    ("input", "the input differs"),
    ("model", "the checkpoint differs"),
]


@pytest.mark.parametrize(("change", "why"), CHANGES, ids=str)
def test_another_job_is_refused_until_its_rows_may_go(work, model, quick, change, why, capsys):
    write(words(10))
    interrupt(3, model, "--shard-size", "4", output="out")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    options = change.split() if change.startswith("--") else []
    if change == "input":
        write([*words(9), {"prompt": "b"}])
    elif change == "model":
        model = Path(shutil.copytree(model, work / "other"))
        raw = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**raw, "rope_theta": 5e5}))
    capsys.readouterr()
    assert run(model, *options, output="out") == 2
    error = capsys.readouterr().err
    assert f"records of another job ({why}); choose another output, or delete them with" in error
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before
    assert run(model, *options, "--overwrite", output="out") == 0
    assert [record["id"] for record in results("out")] == list(range(1, 11))
    # The same command resumes its own records instead of deleting them.
    assert run(model, *options, "--overwrite", output="out") == 0


def test_memory_that_does_not_suffice(model, quick, monkeypatch, capsys):
    write(words(8))
    stop_after(1, RuntimeError("RESOURCE_EXHAUSTED: out of memory"), monkeypatch)
    assert run(model) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert (
        "too little memory for 4 sequences at a time; try a smaller --batch-size; 2 of 8" in error
    )
    assert error.endswith(kept(2, 8))


def test_other_errors_are_not_hidden_and_lose_nothing(model, quick, monkeypatch, decoded):
    write(words(8))
    with monkeypatch.context() as patch:
        stop_after(2, RuntimeError("a fault"), patch)
        with pytest.raises(RuntimeError, match="a fault"):
            run(model)
    decoded.clear()
    assert run(model) == 0
    assert 0 < len(decoded) < 8
    assert [record["id"] for record in results()] == list(range(1, 9))


def test_sigterm_finishes_the_rows_under_way_and_begins_no_more(
    model, quick, monkeypatch, decoded, capsys
):
    write(words(16))
    handler, add = signal.getsignal(signal.SIGTERM), PartFile.add
    with monkeypatch.context() as patch:
        asked = []

        def asked_to_end(self, *record):
            add(self, *record)
            if len(decoded) == 2 and not asked:
                asked.append(record)
                os.kill(os.getpid(), signal.SIGTERM)

        patch.setattr(PartFile, "add", asked_to_end)
        assert run(model) == 143
    assert signal.getsignal(signal.SIGTERM) is handler
    records = len(decoded)
    assert 2 <= records < 8
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"stopped by SIGTERM: {kept(records)}; the same command continues from there"
    assert run(model) == 0
    assert len(decoded) == 16
    assert [record["id"] for record in results()] == list(range(1, 17))


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
                os.kill(os.getpid(), signal.SIGTERM)
            asked.append(sample)
            end(self, sample)

        patch.setattr(Handle, "_end", asked_to_end)
        assert run(model, *options) == 143
        assert 1 <= len(asked) <= 4, "nothing is decoded that comes to nothing"
    assert f"stopped by SIGTERM: {kept(0, 2)}; " in capsys.readouterr().err
    assert run(model, *options) == 0
    assert Path("out.jsonl").read_bytes() == Path("whole.jsonl").read_bytes()
    assert [len(record["samples"]) for record in results()] == [40, 40]


def test_sigterm_waits_no_longer_than_its_grace(model, quick, monkeypatch, capsys):
    write(words(16))
    quick_run = LLM.run

    def slow(self, records, on_progress, **_):
        yield next(quick_run(self, records, on_progress))
        os.kill(os.getpid(), signal.SIGTERM)
        while True:  # forwards of sequences that do not end
            on_progress(Progress(2, None, 40, 20, 80))

    monkeypatch.setattr(LLM, "run", slow)
    assert run(model, "--grace", "0.2") == 143
    assert f"stopped by SIGTERM: {kept(2)}; " in capsys.readouterr().err


def test_sigterm_before_anything_is_decoded(model, monkeypatch, capsys):
    write(words(2))
    monkeypatch.setattr(
        "infer.job.job.build_index", lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert run(model) == 143
    assert capsys.readouterr().err == "stopped by SIGTERM: nothing was decoded yet\n"
    assert os.listdir() == ["in.jsonl"]


def test_replicas_change_no_row(model):
    records = words(8)
    records[2] = {"prompt": "12 + 30 = " * 20}
    write(records)
    assert run(model) == 0
    assert run(model, "--mesh", "data=2", output="replicas.jsonl") == 0
    assert Path("replicas.jsonl").read_bytes() == Path("out.jsonl").read_bytes()
