"""Jobs as a whole: records in, results out, in a file or a folder."""

import dataclasses
import json
import os
from pathlib import Path

import pytest

from infer.job.part_file import FORMAT
from infer.job.prompt_record import prepared_record, record_seed
from tests.examples.full_disk import make_read_only, small_disk
from tests.infer.job.job_examples import (
    GREEDY,
    KEYS,
    WORDS,
    as_record,
    read_json,
    results,
    run,
    words,
    write,
)
from tests.wedlm_jax.test_messages import TEMPLATE, TOOLS
from wedlm_jax.errors import STORAGE_FAILED, InputError
from wedlm_jax.params import SamplingParams

HI = [{"role": "user", "content": "hi"}]
ROWS = [
    (1, {"prompt": WORDS[0]}, {}),
    ("ids", {"prompt_token_ids": [70, 80, 90]}, {"logprobs": None}),
    (77, {"messages": HI}, {}),
    (4, {"prompt": WORDS[0]}, {"max_tokens": 5, "seed": 3, "top_k": 0}),
    ("ends", {"prompt": "mat"}, {"temperature": 0, "stop_token_ids": (270, 280, 290)}),
    ("one", {"prompt": "mat"}, {"mode": "paper", "entropy_threshold": None}),
    (7, {"prompt": WORDS[2]}, {}),
    ("x", {"prompt": WORDS[0]}, {"n": 3, "seed": 5}),
    (9, {"prompt": WORDS[1]}, {"n": 2, "logprobs": 0, "stop": ["a"]}),
    (10, {"prompt": "a"}, {"n": 2, "logprobs": None}),
    (11, {"prompt": WORDS[0]}, {}),
]
"""Ids, prompts and sampling; an integer that is the row's number needs not be given."""


def test_every_row_is_what_the_library_says_of_it(model, llm, capsys):
    """With the command's parameters, which its own override; it draws by its id alone."""
    names, prompts, changes = zip(*ROWS, strict=True)
    records = [
        one | ({} if name == number else {"id": name}) | ({"sampling": own} if own else {})
        for number, (name, one, own) in enumerate(ROWS, 1)
    ]
    write(records)
    options = "--temperature 1 --top-k 9 --seed 4294967295 --entropy-threshold 3 --logprobs 2"
    assert run(model, *options.split(), "--shard-size", "3") == 0
    out, err = capsys.readouterr()
    base = SamplingParams(
        max_tokens=24, temperature=1.0, top_k=9, entropy_threshold=3.0, logprobs=2
    )
    params = [
        dataclasses.replace(base, **({"seed": record_seed(2**32 - 1, name)} | own))
        for name, own in zip(names, changes, strict=True)
    ]
    (chat,) = (llm.chat_prompt(one["messages"]) for one in prompts if "messages" in one)
    ids = [one.get("prompt") or one.get("prompt_token_ids") or chat for one in prompts]
    completions = llm.generate(ids, params)
    found = results()
    assert found == [as_record(*pair) for pair in zip(names, completions, strict=True)]
    assert len({record["text"] for record in found}) == len(ROWS), "each is sampled on its own"
    for record, own in zip(found, changes, strict=True):
        extra = ["logprobs"] if own.get("logprobs", 2) is not None else []
        assert list(record) == [*KEYS, *extra, *(["samples"] if "n" in own else [])]
    samples = [sample for record in found for sample in record.get("samples", [record])]
    assert sorted(os.listdir("out.jsonl.shards")) == ["job.json", "stats.json"]
    stats = read_json("out.jsonl.shards/stats.json")
    tokens = sum(len(sample["token_ids"]) for sample in samples)
    forwards, instances = (sum(one[name] for one in samples) for name in KEYS[4:6])
    expected = {
        "rows": len(ROWS),
        "error_rows": 0,
        "shards": 4,
        "tokens": tokens,
        "num_forwards": forwards,
        "num_token_instances": instances,
        "tokens_per_forward": round(tokens / forwards, 4),
        "p_cache": round(tokens / instances, 4),
    }
    for ours, theirs in (("mask_drafts", "masks"), ("lookup_drafts", "lookup")):
        for end in ("", "_accepted"):
            expected[ours + end] = sum(one["drafts"][theirs + end] for one in samples)
    assert stats["mask_drafts"] > 0
    assert {name: stats[name] for name in expected} == expected
    assert stats["output"]["bytes"] == Path("out.jsonl").stat().st_size
    assert stats["last_run"]["tokens"] == tokens
    assert out == ""
    summary = err.splitlines()[-1]
    assert summary.startswith(f"out.jsonl: {len(ROWS)} records, {tokens} tokens in ")
    ratios = f"{tokens / forwards:.2f} tokens per forward, p_cache {tokens / instances:.2f})"
    assert ratios in summary
    assert summary.endswith("s of compiling")
    # Wherever a row stands, it is the same.
    write([{**one, "id": name} for name, one in zip(names, records, strict=True)][::-1], "b.jsonl")
    assert run(model, *options.split(), "--shard-size", "2", input="b.jsonl", output="b") == 0
    assert results("b") == found[::-1]


def test_a_folder_has_shards_with_manifests(model, quick):
    write(words(8))
    assert run(model) == 0
    assert run(model, "--shard-size", "3", output="out") == 0
    names = [f"rows-0000{k}-of-00003" for k in range(3)]
    ends = (".jsonl", ".manifest.json")
    assert {*os.listdir("out")} == {"job.json", "stats.json"} | {n + e for n in names for e in ends}
    assert [len(results(f"out/{name}.jsonl")) for name in names] == [3, 3, 2]
    assert results("out") == results()
    job = read_json("out/job.json")
    assert job["settings"]["params"]["max_tokens"] == 24
    for k, name in enumerate(names):
        manifest, records = read_json(f"out/{name}.manifest.json"), results(f"out/{name}.jsonl")
        assert (manifest["shard"], manifest["first_row"]) == (k, 3 * k + 1)
        assert manifest["counts"]["rows"] == len(records)
        assert manifest["counts"]["tokens"] == sum(len(record["token_ids"]) for record in records)
        assert {"wedlm_generate": FORMAT, **manifest["job"]} == job
        assert {"input", "checkpoint", "settings"} <= set(manifest["job"])


def test_seeds_tell_ids_apart():
    names = [*range(5000), *map(str, range(5000)), "", "é"]
    seeds = [record_seed(0, name) for name in names]
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert len(set(seeds)) >= len(names) - 1, "32 bits: a collision is expected once in 90 runs"
    assert record_seed(1, 0) != record_seed(0, 0) == record_seed(0, 0) != record_seed(0, "0")


def test_chat_option_applies_to_texts(model):
    write([{"prompt": "hi"}, {"messages": [{"role": "user", "content": "hi"}]}] * 2)
    assert run(model, "--chat") == 0
    first, *others = results()
    assert others == [{**first, "id": i} for i in (2, 3, 4)]


def test_records_have_windows_of_their_own(model, llm):
    paper = {"mode": "paper", "max_tokens": 12}
    windows = (None, 0, 1, 4)
    write([{"prompt": WORDS[1], "window_size": one, "sampling": paper} for one in windows])
    assert run(model) == 0
    params = SamplingParams(max_tokens=12, mode="paper")
    ids, _ = llm.prepare_one(WORDS[1], params)
    whole = {
        i: one for batch in llm.run([(ids, params, one) for one in windows]) for i, one in batch
    }
    assert results() == [as_record(i + 1, whole[i]) for i in range(len(windows))]
    default, zero, one, four = results()
    assert {**default, "id": 4} == four
    assert zero["num_forwards"] == zero["num_token_instances"] == len(zero["token_ids"]), "AR"
    assert zero["num_token_instances"] < one["num_token_instances"] < four["num_token_instances"]


def test_no_seed_and_no_sampling_are_those_of_the_job(model, quick):
    sampled = []
    for given in ({}, *({"sampling": x} for x in (None, {}, {"seed": None}, {"seed": -1}))):
        write([{"id": "x", "prompt": "a", **given}])
        assert run(model, "--temperature", "1", "--seed", "5", "--overwrite") == 0
        sampled += results()
    assert sampled == [sampled[0]] * 5


def test_tools_and_template_variables_of_a_record_reach_the_template(llm, monkeypatch):
    monkeypatch.setattr(llm.codec.tokenizer, "chat_template", TEMPLATE)
    monkeypatch.setattr(llm.codec, "variables", {"enable_thinking": False})

    def prompt_of(chat=False, **fields):
        return llm.codec.decode(prepared_record(llm, fields, GREEDY, chat=chat)[0])

    listed, asked = f"[tools]{json.dumps(TOOLS[0])}", "[user]hi[assistant]"
    own = {"enable_thinking": True}
    turn = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert prompt_of(messages=turn, tools=TOOLS) == f"{listed}{asked}()"
    assert prompt_of(messages=turn, tools=json.dumps(TOOLS)) == f"{listed}{asked}()"
    assert prompt_of(messages=turn, chat_template_kwargs=own) == asked
    assert prompt_of(chat=True, prompt="hi", chat_template_kwargs=own) == asked
    for fields in ({"prompt": "hi"}, {"prompt_token_ids": [70]}):
        with pytest.raises(InputError, match="chat_template_kwargs: "):
            prompt_of(**fields, chat_template_kwargs=own)
    with pytest.raises(InputError, match="tools: expected a list of objects, not 5"):
        prompt_of(messages=turn, tools=5)


def test_a_file_of_another_job_or_of_no_job_is_kept(model, quick, refusal):
    write(words(4))
    assert run(model) == 0
    whole = Path("out.jsonl").read_bytes()
    write([{"prompt": "mine"}], "mine.jsonl")
    mine = Path("mine.jsonl").read_bytes()
    finished = "out.jsonl: holds finished records of another job (temperature is 0.0 there"
    foreign = "mine.jsonl: exists, but was not written by a job; choose"
    for name, before, message in (("out.jsonl", whole, finished), ("mine.jsonl", mine, foreign)):
        assert message in refusal("--temperature", "0.5", output=name)
        assert Path(name).read_bytes() == before
        assert not Path("mine.jsonl.shards").exists()
        assert run(model, "--temperature", "0.5", "--overwrite", output=name) == 0
        assert Path(name).read_bytes() != before
    write([{"prompt": "mine"}], "folder/mine.jsonl")
    expected = "folder: expected a new folder or a job's, but it contains mine.jsonl"
    assert expected in refusal("--overwrite", output="folder")


@pytest.mark.parametrize("output", ["out", "out.jsonl"])
def test_a_full_disk_is_told_and_what_was_decoded_stays(work, quick, output, refusal):
    write(words(400))
    with small_disk(work / "disk", 64 * 1024) as disk:
        where = str(disk / output)
        printed = refusal(status=STORAGE_FAILED, output=where)
        assert printed.startswith(f"wedlm generate: {where}")
        assert "cannot be written (No space left on device)" in printed
        assert list(disk.glob("*/parts/*.part"))


@pytest.mark.parametrize("output", ["out", "out.parquet"])
def test_a_finished_job_is_finished_on_a_disk_that_is_read_only(
    work, model, quick, output, capsys, refusal
):
    write(words(5))
    with small_disk(work / "disk", 2**20) as disk:
        where = str(disk / output)
        assert run(model, "--shard-size", "2", output=where) == 0
        make_read_only(disk)
        capsys.readouterr()
        assert run(model, "--shard-size", "2", output=where) == 0
        printed = capsys.readouterr().err.splitlines()
        assert printed == [f"{where} is already complete, with 5 records"]
        another = " of another job (seed is 0 there and 1 here)"
        assert another in refusal("--seed", "1", output=where)
        assert "cannot be written (Read-only file system)" in refusal(output=str(disk / "new"))
