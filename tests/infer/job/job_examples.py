"""Small jobs for the tests, and ways to run, stop and read them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from wedlm_jax.__main__ import main
from wedlm_jax.completion import Completion
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

GREEDY = SamplingParams(max_tokens=24)
WORDS = ["the cat", "one two three", "naïve 日本", "12 + 30 = ", "a", "mat", "= 42", "on on on"]
KEYS = ["id", "text", "token_ids", "finish_reason", "num_forwards", "num_token_instances", "drafts"]
SHAPE = ["--window-size", "4", "--max-tokens", "24", "--batch-size", "4"]


def lines(records: list[Any]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def write(records: list[Any], name: str = "in.jsonl") -> None:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_bytes(lines(records))


def words(count: int = len(WORDS)) -> list[dict[str, Any]]:
    return [{"prompt": WORDS[i % len(WORDS)]} for i in range(count)]


def run(model: Path, *options: str, input: str = "in.jsonl", output: str = "out.jsonl") -> int:
    files = ["--input", input, "--output", output]
    return main(["generate", "--model", str(model), *files, *SHAPE, *options])


def results(name: str = "out.jsonl") -> list[dict[str, Any]]:
    """The rows of a file, or of a folder's shards in order."""
    path = Path(name)
    files = sorted(path.glob("rows-*.jsonl")) if path.is_dir() else [path]
    return [json.loads(line) for file in files for line in file.read_bytes().splitlines()]


def contents(name: str) -> bytes:
    """All rows of a folder of shards, as bytes."""
    return b"".join(path.read_bytes() for path in sorted(Path(name).glob("rows-*.jsonl")))


def as_record(name: str | int, completion: Completion) -> dict[str, Any]:
    """The row that a file has of it; all log-probabilities are finite."""

    def fields(sample: Completion) -> dict[str, Any]:
        result = dataclasses.asdict(sample)
        for name in ("further", "num_cached_tokens", "forwards_at", "instances_at", "drafts_at"):
            del result[name]
        result["drafts"] = sample.drafts._asdict()
        if result["logprobs"] is None:
            del result["logprobs"]
        value: dict[str, Any] = json.loads(json.dumps(result, allow_nan=False))
        return value

    several = {"samples": [fields(sample) for sample in completion.samples]}
    return {"id": name, **fields(completion), **(several if completion.further else {})}


def stop_after(batches: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets ``error`` strike once so many batches are kept, and then never again."""
    run, left = LLM.run, [batches]

    def failing(*arguments: Any, **options: Any) -> Any:
        for batch in run(*arguments, **options):
            left[0] -= 1
            if left[0] == -1:
                raise error
            yield batch

    monkeypatch.setattr(LLM, "run", failing)


def read_json(path: str) -> dict[str, Any]:
    value = json.loads(Path(path).read_bytes())
    assert isinstance(value, dict)
    return value
