"""Output records: own keys, which are passed on; JSON; Parquet; sums."""

import datetime
import decimal
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from infer.job import result_record
from infer.job.result_record import OUTPUT_KEYS
from tests.infer.job.job_examples import KEYS, read_json, results, run, words, write, write_parquet
from wedlm_jax.errors import BAD_DATA
from wedlm_jax.records.parquet import without_nulls

MINE = {"topic": {"name": "naïve", "tags": [1, None, {}]}, "source": None, "score": 0.5, "": [[]]}


def test_results_and_errors_have_them(model, quick, capsys):
    many = {"prompt": "d", "sampling": {"n": 2, "temperature": 1}, "x": 2}
    own = [{"prompt": "a", **MINE}, {"prompt": 5, **MINE}]
    write([*own, {"prompt": "b"}, {"prompt": "c", "x": 1}, many])
    assert run(model) == 0
    good, bad, none, other, several = results()
    assert list(several) == [*KEYS, "samples", "x"]
    assert all("x" not in sample for sample in several["samples"])
    assert list(good) == [*KEYS, *MINE]
    assert list(bad) == ["id", "error", "line", *MINE]
    assert all(record[key] == value for record in (good, bad) for key, value in MINE.items())
    assert list(none) == KEYS
    assert other["x"] == 1
    printed = capsys.readouterr().err
    assert "not read but copied to the output: topic, source, score, , x\n" in printed
    assert "did you mean" not in printed


def test_the_prompts_tokens_on_request(model, quick):
    write([{"prompt": "a b", "x": 1}, {"prompt_token_ids": [5, 6]}])
    assert run(model, "--prompt-token-ids") == 0
    first, second = results()
    assert list(first) == [*KEYS, "prompt_token_ids", "x"]
    assert len(first["prompt_token_ids"]) > 1
    assert second["prompt_token_ids"] == [5, 6]


def test_values_of_tables_become_those_of_json(model, quick):
    row = {
        "prompt": "a",
        "day": datetime.date(2020, 1, 2),
        "at": datetime.datetime(2020, 1, 2, 3, 4, 5),
        "bytes": b"\xff\x00",
        "price": decimal.Decimal("1.50"),
        "nothing": float("nan"),
        "deep": {"a": None, "b": [{"c": None}]},
        "absent": None,
    }
    columns = {
        "kind": pa.array(["x", "y"]).dictionary_encode(),
        "small": pa.array([1, 2], pa.int8()),
        "map": pa.array([[("k", "v")], []], pa.map_(pa.string(), pa.string())),
    }
    write_parquet([row, row | {"absent": "x"}], "in.parquet", **columns)
    assert run(model, input="in.parquet") == 0
    lines = Path("out.jsonl").read_bytes().splitlines()
    first = json.loads(lines[0], parse_constant=lambda name: pytest.fail(name))
    expected = {
        "day": "2020-01-02",
        "at": "2020-01-02T03:04:05",
        "bytes": "/wA=",
        "price": "1.50",
        "nothing": None,
        "deep": {"a": None, "b": [{"c": None}]},
        "absent": None,
        "kind": "x",
        "small": 1,
        "map": [["k", "v"]],
    }
    assert {key: first[key] for key in expected} == expected
    assert run(model, input="in.parquet", output="out.parquet") == 0
    assert pq.read_table("out.parquet").select(list(expected)).to_pylist() == [
        expected,
        expected | {"absent": "x", "kind": "y", "small": 2, "map": []},
    ]


def test_what_looks_misspelt_is_told_once(model, quick, capsys):
    hints = {
        "smapling": "'smapling' is not read; did you mean 'sampling'?",
        "temperature": "'temperature' is read only within \"sampling\"",
        "max_token": "'max_token' is not read; did you mean 'max_tokens' within \"sampling\"?",
    }
    write([{"prompt": "a"}, *({"prompt": "a", "topic": 2, **hints} for _ in range(5))])
    assert run(model) == 0
    assert [record.get("max_token") for record in results()] == [None, *[hints["max_token"]] * 5]
    printed = capsys.readouterr().err
    assert [printed.count(hint) for hint in hints.values()] == [1, 1, 1]
    assert printed.count("not read") == 3


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_keys_of_the_output_are_refused_at_the_first_record(never_decodes, refusal, kind):
    records = [{"prompt": "a", "text": "b"}]
    write(records) if kind == "jsonl" else write_parquet(records, "in.parquet")
    where = "in.jsonl line 1" if kind == "jsonl" else "in.parquet"
    assert f"{where}: 'text' is a key of output records" in refusal(input=f"in.{kind}")
    assert os.listdir() == [f"in.{kind}"]


TABLE = [
    {"prompt": "the cat", "note": "naïve 日本\u2028\n", "score": 3, "tags": ["a", "é"]},
    {"prompt": "mat", "score": 2.5, "deep": {"a": [{"b": 1}, {"c": None}], "none": {}}, "tags": []},
    {"promt": "bad", "note": None, "score": -(2**40), "deep": {"d": True}, "empty": {}},
    {"prompt": "a", "big": 2**63 - 1, "flag": False, "": "no name", "dots.in it": 1},
]
MANY = {"sampling": {"temperature": 1.0, "n": 2, "logprobs": 2}, "prompt": "on"}


def as_jsonl(row):
    """What a .jsonl file has of a row, but for nulls and objects without keys."""
    for sample in (row, *(row["samples"] or ())):
        for token in sample["logprobs"] or ():
            token["top"] = [[pair["token_id"], pair["logprob"]] for pair in token["top"]]
    return without_nulls(row)


def test_a_file_has_what_jsonl_has_in_typed_columns(work, model, quick, monkeypatch):
    monkeypatch.setattr(result_record, "GROUP_ROWS", 3)
    write([*TABLE, MANY, *words(3)])
    assert run(model) == 0
    assert run(model, "--shard-size", "3", output="out.parquet") == 0
    table = pq.read_table("out.parquet")
    rows, lines = table.to_pylist(), results()
    impossible = rows[4]["samples"][0]["logprobs"][0]["top"][-1]
    assert impossible["logprob"] is None, "as in JSON, which has no infinity"
    assert [as_jsonl(row) for row in rows] == [without_nulls(line) for line in lines]
    assert table.column_names == [
        *OUTPUT_KEYS,
        *("note", "score", "tags", "deep", "promt", "empty", "big", "flag", "", "dots.in it"),
    ]
    kinds = {field.name: field.type for field in table.schema}
    assert kinds["id"] == kinds["big"] == pa.int64()
    assert kinds["token_ids"] == pa.list_(pa.int32())
    assert (kinds["score"], kinds["flag"]) == (pa.float64(), pa.bool_())
    assert kinds["deep"].field("a").type.value_type.field("b").type == pa.int64()
    meta = pq.ParquetFile("out.parquet").metadata
    assert [meta.row_group(i).num_rows for i in range(meta.num_row_groups)] == [3, 3, 2]
    stats = read_json("out.parquet.shards/stats.json")
    assert stats["output"]["bytes"] == Path("out.parquet").stat().st_size
    assert sorted(path.name for path in work.iterdir()) == [
        *("in.jsonl", "out.jsonl", "out.jsonl.shards", "out.parquet", "out.parquet.shards")
    ]


def test_a_file_that_was_not_put_together_is_so_the_next_time(model, quick, decoded, monkeypatch):
    write(words(20))
    with monkeypatch.context() as patch:
        patch.setattr(result_record, "_row", lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
        assert run(model, "--shard-size", "6", output="out.parquet") == 130
    assert not Path("out.parquet").exists()
    decoded.clear()
    assert run(model, output="out.parquet") == 0
    assert not decoded
    assert pq.read_table("out.parquet")["id"].to_pylist() == list(range(1, 21))


def test_an_id_that_is_a_date_is_refused(model, quick):
    write_parquet([{"id": datetime.date(2020, 1, 1), "prompt": "a"}], "in.parquet")
    assert run(model, input="in.parquet") == BAD_DATA
    error = 'id: expected a text or an integer, not "datetime.date(2020, 1, 1)"'
    assert results() == [{"error": error, "line": 1}]


def test_a_job_of_bad_records_alone_gives_their_errors(model, quick):
    write([{"x": 1}, {"id": True, "prompt": "a"}])
    Path("in.jsonl").write_bytes(Path("in.jsonl").read_bytes() + b"no json\n")
    assert run(model, output="out.parquet") == BAD_DATA
    rows = pq.read_table("out.parquet").to_pylist()
    assert [(row["id"], row["line"], row["text"]) for row in rows] == [
        *((1, 1, None), (None, 2, None), (None, 3, None))
    ]
    assert all(row["error"] for row in rows)


BATCH = {"custom_id": "q", "url": "/v1/completions", "body": {"prompt": "a"}}
MIXED = [
    ([{"x": 1}, {"x": "one"}], "in.jsonl line 2: 'x' is a text here and an integer before, and a "),
    ([{"x": None}, {"x": {"y": [1]}}, {"x": {"y": [True]}}], "line 3: 'x' is true or false here"),
    ([{"x": [1, "a"]}], "line 1: 'x' is a text here and an integer before"),
    ([{"x": [1]}, {"x": {}}], "line 2: 'x' is an object here and a list before"),
    ([{"x": 2**63}], "line 1: 'x' is an integer of more than 64 bits; use a .jsonl file as "),
    ([{"id": "a"}, {}], "line 2: 'id' is an integer here and a text before, and a column has"),
    ([BATCH], "batch files are answered in that form, which has no columns"),
]


def test_what_has_no_column_is_refused_before_a_model_is_loaded(work, capsys):
    for records, message in MIXED:
        write([one if one is BATCH else {"prompt": "a", **one} for one in records])
        assert run(work / "never-loaded", output="out.parquet") == 2
        assert message in capsys.readouterr().err.splitlines()[-1]
        assert os.listdir() == ["in.jsonl"]
    for name, value in (("a", 1), ("b", "x")):
        write_parquet([{"prompt": "a", "id": name, "x": value}], f"in/{name}.parquet")
    assert run(work / "never-loaded", input="in", output="out.parquet") == 2
    assert "in/b.parquet: 'x' is a text here and an integer before" in capsys.readouterr().err
