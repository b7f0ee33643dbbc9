"""Small jobs for the tests, ways to run, stop and read them, and a decoder that takes no time."""

import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import jax
import pytest

from tests.forward_sizes import one_size
from wedlm_jax.__main__ import main
from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.host.progress import Progress
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams, sample_seed

GREEDY = SamplingParams(max_tokens=24)
WORDS = ["the cat", "one two three", "naïve 日本", "12 + 30 = ", "a", "mat", "= 42", "on on on"]
KEYS = ["id", "text", "token_ids", "finish_reason", "num_forwards", "num_token_instances", "drafts"]
SHAPE = ["--window-size", "4", "--max-tokens", "24", "--batch-size", "4"]


def lines(records):
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def write(records, name="in.jsonl"):
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(lines(records))


def write_parquet(records, name, group=4, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    keys = {key for record in records for key in record}
    table = pyarrow.table(
        {key: [record.get(key) for record in records] for key in sorted(keys)} | columns
    )
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, name, row_group_size=group)


def words(count=8):
    return [{"prompt": WORDS[i % len(WORDS)]} for i in range(count)]


def run(model, *options, input="in.jsonl", output="out.jsonl"):
    """Runs a job; several inputs are separated by spaces."""
    files = ["--input", *input.split(), "--output", output]
    return main(["generate", "--model", str(model), *files, *SHAPE, *options])


def contents(name="out.jsonl"):
    """The bytes of a file, or of a folder's shards in order."""
    path = Path(name)
    files = sorted(path.glob("rows-*.jsonl")) if path.is_dir() else [path]
    return b"".join(file.read_bytes() for file in files)


def results(name="out.jsonl"):
    return [json.loads(line) for line in contents(name).splitlines()]


def as_record(name, completion):
    """The row that a file has of it; all log-probabilities are finite."""

    def fields(sample):
        result = dataclasses.asdict(sample)
        for name in ("further", "num_cached_tokens", "forwards_at", "instances_at", "drafts_at"):
            del result[name]
        result["drafts"] = sample.drafts._asdict()
        if result["logprobs"] is None:
            del result["logprobs"]
        return json.loads(json.dumps(result, allow_nan=False))

    several = {"samples": [fields(sample) for sample in completion.samples]}
    return {"id": name, **fields(completion), **(several if completion.further else {})}


def stop_after(batches, error, monkeypatch):
    """Raises ``error`` once, when ``batches`` batches are kept."""
    run, left = LLM.run, [batches]

    def failing(*arguments, **options):
        for batch in run(*arguments, **options):
            left[0] -= 1
            if left[0] == -1:
                raise error
            yield batch

    monkeypatch.setattr(LLM, "run", failing)


def interrupt(batches, model, *options, input="in.jsonl", output="out.jsonl"):
    """Runs a job that Ctrl-C stops once ``batches`` batches are kept."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(batches, KeyboardInterrupt(), patch)
        assert run(model, *options, input=input, output=output) == 130


def read_json(path):
    return json.loads(Path(path).read_bytes())


def quick_completion(record):
    token_ids, params, *window = record
    if params.n > 1:
        seeds = [sample_seed(params.seed, sample) for sample in range(params.n)]
        each = [dataclasses.replace(params, n=1, seed=seed) for seed in seeds]
        first, *further = [quick_completion((token_ids, one, *window)) for one in each]
        return dataclasses.replace(first, further=tuple(further))
    digest = hashlib.sha256(repr((list(token_ids), params, *window)).encode()).digest()
    ids = list(digest)[: min(params.max_tokens, 1 + digest[0] % 32)]
    logprobs = None
    if params.logprobs is not None:
        # The last alternative is an impossible one.
        values = [-i / 3 for i in range(params.logprobs - 1)] + [-math.inf]
        top = list(enumerate(values[: params.logprobs]))
        logprobs = [TokenLogprob(-token / 7, top) for token in ids]
    text = f"naïve {ids[0]}\u2028\n"
    return Completion(text, ids, "length", 1 + len(ids) // 2, 3 * len(ids), logprobs)


def quick_run(self, records, on_progress=None, *, stopping=None, on_failure=None):
    """As `LLM.run`: prompts are read a few at a time, and come back in another order."""
    numbered, running, finished, tokens = enumerate(records), [], 0, 0
    while True:
        running += itertools.islice(numbered, self.options.max_batch_size - len(running))
        if not running:
            return
        done = [(i, quick_completion(record)) for i, record in running[1::2] or running]
        running = running[0::2] if len(running) > 1 else []
        finished, tokens = finished + len(done), tokens + sum(len(c.token_ids) for _, c in done)
        if on_progress is not None:
            on_progress(Progress(finished, None, tokens, tokens, tokens))
        yield done[::-1]


PRELOADED = ["tests.infer.job.job_examples", "infer.job.job", "wedlm_jax.llm", "transformers"]


def command_in_child(arguments):
    """What it prints goes into the file ``printed.txt``."""
    with open("printed.txt", "a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Every one of them compiles the same programs, which then takes no time.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        one_size()
        sys.exit(main(["generate", *arguments]))


def processes():
    """Makes child processes of a server that has imported the project already, so that each is
    ready in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def start(model, *options):
    arguments = ["--model", str(model), "--input", "in.jsonl", "--output", "out"]
    child = processes().Process(target=command_in_child, args=([*arguments, *SHAPE, *options],))
    child.start()
    return child


def ask_to_end():
    os.kill(os.getpid(), signal.SIGTERM)
