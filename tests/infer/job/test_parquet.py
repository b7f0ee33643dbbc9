"""Records of Parquet files, where pyarrow is installed; and one sentence where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.infer.job.job_examples import results, run, words, write
from wedlm_jax.errors import BAD_DATA

CHAT = [{"role": "user", "content": "hi"}]
ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "the cat"},
    {"id": "b", "prompt_token_ids": [70, 80, 90]},
    {"id": "c", "messages": CHAT},
    {"id": "d", "prompt": "mat", "sampling": {"temperature": 1.0, "seed": 4}},
    {"id": "e"},
    {"id": "f", "prompt": "mat", "sampling": {"top_p": 7.0}},
    {"prompt": "a"},
    {"id": "a", "prompt": "twice"},
    {"id": "g", "prompt_token_ids": [5000]},
    {"id": "h", "prompt": "mat", "sampling": {"temperature": 1.0, "n": 2, "logprobs": 1}},
]


def write_parquet(records: list[dict[str, Any]], name: str, group: int = 4, **columns: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    keys = {key for record in records for key in record}
    table = pyarrow.table(
        {key: [record.get(key) for record in records] for key in sorted(keys)} | columns
    )
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(table, name, row_group_size=group)


@pytest.mark.parametrize("group", [1, 4, 100])
def test_parquet_rows_are_those_of_jsonl(
    work: Path, model: Path, quick: None, group: int, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = ["web", None] * (len(ROWS) // 2)
    write_parquet(ROWS, "in.parquet", group, source=sources)
    write([{**row, "source": one} for row, one in zip(ROWS, sources, strict=True)])
    assert run(model, output="plain.jsonl") == 0
    assert run(model, "--shard-size", "2", input="in.parquet") == 0
    assert results() == results("plain.jsonl")
    assert [record.get("line") for record in results()] == [None] * 4 + [5, 6, None, 8, 9, None]
    said = capsys.readouterr().err
    assert said.count("keys that are not read, and passed on to the output: source\n") == 2


def test_structs_within_sampling_have_no_keys_of_other_records(
    work: Path, model: Path, quick: None
) -> None:
    biases = [{"5": 1.0}, {"9": 2.0}, None, {}, {"5": None}]
    write_parquet(
        [{"prompt": "a", "sampling": {"logit_bias": one}} for one in biases], "in.parquet"
    )
    assert run(model, input="in.parquet") == 0
    assert not [record for record in results() if "error" in record]


def test_sampling_as_a_text_of_json(work: Path, model: Path, quick: None) -> None:
    texts = ['{"top_k": 5, "entropy_threshold": null}', '{"top_k": -2}', "no JSON", None]
    write_parquet([{"prompt": "a", "sampling": text} for text in texts], "in.parquet")
    write([{"prompt": "a", "sampling": {"top_k": 5, "entropy_threshold": None}}])
    assert run(model, output="plain.jsonl") == 0
    assert run(model, input="in.parquet") == 0
    first, second, third, last = results()
    assert [first] == results("plain.jsonl")
    assert second["error"].startswith("sampling.top_k: expected an integer")
    assert third["error"] == 'sampling: expected an object, not "no JSON"'
    assert "error" not in last


def test_values_that_json_has_not(work: Path, model: Path, quick: None) -> None:
    import datetime

    write_parquet([{"id": datetime.date(2020, 1, 1), "prompt": b"\xff\x00"}], "in.parquet")
    assert run(model, input="in.parquet") == BAD_DATA
    (record,) = results()
    assert record == {
        "error": 'id: expected a text or an integer, not "datetime.date(2020, 1, 1)"',
        "line": 1,
    }


def test_a_folder_may_hold_both_kinds(work: Path, model: Path, quick: None) -> None:
    records = [{"id": i, "prompt": "a"} for i in range(9)]
    write_parquet(records[:5], "data/a.parquet", 2)
    write(records[5:7], "data/b.jsonl")
    write_parquet(records[7:], "data/c.parquet")
    assert run(model, "--shard-size", "3", input="data") == 0
    assert [record["id"] for record in results()] == list(range(9))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PAR1 no", "in.parquet: cannot be read as Parquet ("),
        (None, "expected a column prompt, prompt_token_ids or messages; there are id, words"),
    ],
)
def test_files_that_cannot_be_read(
    work: Path,
    model: Path,
    content: bytes | None,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_parquet([{"id": 1, "words": "a"}], "in.parquet")
    if content is not None:
        Path("in.parquet").write_bytes(content)
    assert run(model, input="in.parquet") == 2
    assert message in capsys.readouterr().err


def test_without_pyarrow_one_sentence_says_how_to_get_it(
    work: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(words(1), "in.parquet")
    assert run(model, input="in.parquet") == 2
    said = capsys.readouterr().err
    assert (
        "Parquet files need pyarrow, which is not installed: pip install 'wedlm-jax[data]'" in said
    )
