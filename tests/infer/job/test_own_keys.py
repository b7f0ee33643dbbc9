"""Keys of a record that mean nothing here are the user's own: the output has them, too."""

from __future__ import annotations

import datetime
import decimal
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.infer.job.job_examples import KEYS, contents, results, run, stop_after, write
from tests.infer.job.test_parquet import write_parquet
from wedlm_jax.errors import did_you_mean

OWN = {"topic": {"name": "naïve", "tags": [1, None, {}]}, "source": None, "score": 0.5, "": [[]]}


def test_results_and_errors_have_them(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write([{"prompt": "a", **OWN}, {"prompt": 5, **OWN}, {"prompt": "b"}, {"prompt": "c", "x": 1}])
    assert run(model) == 0
    good, bad, none, other = results()
    assert list(good) == [*KEYS, *OWN]
    assert list(bad) == ["id", "error", "line", *OWN]
    assert all(record[key] == value for record in (good, bad) for key, value in OWN.items())
    assert list(none) == KEYS
    assert other["x"] == 1
    said = capsys.readouterr().err
    assert "not read, and passed on to the output: topic, source, score, , x\n" in said
    assert "did you mean" not in said


def test_all_samples_and_a_job_that_goes_on_have_them(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(
        [{"prompt": str(i), "at": i, **({"sampling": {"n": 2}} if i % 2 else {})} for i in range(9)]
    )
    options = ["--temperature", "1", "--shard-size", "2"]
    assert run(model, *options, output="whole") == 0
    stop_after(2, KeyboardInterrupt(), monkeypatch)
    assert run(model, *options, output="out") == 130
    assert run(model, *options, output="out") == 0
    assert contents("out") == contents("whole")
    assert [record["at"] for record in results("out")] == list(range(9))
    assert list(results("out")[1]) == [*KEYS, "samples", "at"]
    assert all("at" not in sample for sample in results("out")[1]["samples"])


def test_values_of_tables_become_those_of_json(work: Path, model: Path, quick: None) -> None:
    row: dict[str, Any] = {
        "prompt": "a",
        "day": datetime.date(2020, 1, 2),
        "at": datetime.datetime(2020, 1, 2, 3, 4, 5),
        "bytes": b"\xff\x00",
        "price": decimal.Decimal("1.50"),
        "nothing": float("nan"),
        "deep": {"a": None, "b": [{"c": None}]},
        "absent": None,
    }
    write_parquet([row, row | {"absent": "x"}], "in.parquet")
    assert run(model, input="in.parquet") == 0
    lines = Path("out.jsonl").read_bytes().splitlines()
    first = json.loads(lines[0], parse_constant=lambda name: pytest.fail(name))
    assert {key: first[key] for key in row if key != "prompt"} == {
        "day": "2020-01-02",
        "at": "2020-01-02T03:04:05",
        "bytes": "/wA=",
        "price": "1.50",
        "nothing": None,
        "deep": {"a": None, "b": [{"c": None}]},
        "absent": None,
    }


def test_a_number_that_is_too_large_for_json_is_null(work: Path, model: Path, quick: None) -> None:
    Path("in.jsonl").write_text('{"prompt": "a", "x": [1e999, 1e9]}\n')
    assert run(model) == 0
    assert results()[0]["x"] == [None, 1e9]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("smapling", "'smapling' is not read; did you mean 'sampling'?"),
        ("temperature", "'temperature' is not read here, but within \"sampling\""),
        ("max_token", "'max_token' is not read; did you mean 'max_tokens' within \"sampling\"?"),
    ],
)
def test_what_looks_misspelt_is_said_once(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str], key: str, hint: str
) -> None:
    write([{"prompt": "a"}, *({"prompt": "a", "topic": 2, key: i} for i in range(5))])
    assert run(model) == 0
    assert [record.get(key) for record in results()] == [None, *range(5)]
    said = capsys.readouterr().err
    assert said.count(hint) == 1
    assert said.count("not read") == 2


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_keys_of_the_output_are_refused_at_the_first_record(
    work: Path, model: Path, never_decodes: None, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    records = [{"prompt": "a", "text": "b"}]
    write(records) if kind == "jsonl" else write_parquet(records, "in.parquet")
    assert run(model, input=f"in.{kind}") == 2
    where = "in.jsonl line 1" if kind == "jsonl" else "in.parquet"
    assert f"{where}: 'text' is a key of the output" in capsys.readouterr().err
    assert os.listdir() == [f"in.{kind}"]


def test_the_nearest_name_is_the_one_whose_words_are_there() -> None:
    names = ["min_tokens", "max_tokens", "prompt", "prompt_token_ids"]
    assert did_you_mean("max_completion_tokens", names) == "did you mean 'max_tokens'?"
    assert did_you_mean("prompt_tokn_ids", names) == "did you mean 'prompt_token_ids'?"
    assert did_you_mean("xyz", names).startswith("there are min_tokens, ")
