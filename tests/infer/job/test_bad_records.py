"""Records that cannot be decoded: an error instead of a result, and the job continues."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from infer.job.prompt_record import record_fields, record_id
from tests.examples.tiny_checkpoint import VOCAB_SIZE
from tests.infer.job.job_examples import lines, results, run, words, write
from tests.infer.job.quick_decoder import quick_run
from wedlm_jax.completion import Completion
from wedlm_jax.errors import BAD_DATA, InputError
from wedlm_jax.generation import Prepared
from wedlm_jax.llm import LLM
from wedlm_jax.records import jsonl

BAD_LINES = [
    ('{"prompt": "a"', "not JSON (Expecting ',' delimiter at column 15)"),
    ("prompt", "not JSON (Expecting value at column 1)"),
    ('{"prompt": "a", "sampling": {"top_p": NaN}}', "not JSON (NaN is not a JSON number)"),
    ("[" * 100_000, "not JSON ("),
    ('{"prompt": "a", "id": ' + "1" * 5000 + "}", "not JSON ("),
    ('["a"]', 'not a JSON object (["a"])'),
    ('{"prompt": "a", "prompt": "b"}', "not JSON (duplicate key 'prompt')"),
    ('{"promt": "a"}', "not none; 'promt' is not read; did you mean 'prompt'?"),
    ('{"prompt": "a", "line": 1}', "'line' is a key of the output, where this record's own 'line'"),
    ('{"prompt": "a", "x": %s}' % ("[" * 900 + "]" * 900), "nested more than 100 deep"),
    ('{"id": 5}', "expected exactly one of prompt, prompt_token_ids, messages, not none"),
    ('{"prompt": "a", "messages": []}', ", not prompt and messages"),
    ('{"prompt": 5}', "prompt: expected a text, not 5"),
    ('{"prompt": null}', "prompt: expected a text, not null"),
    ('{"prompt": ""}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt": "half \\ud83d"}', "half of a surrogate pair"),
    ('{"prompt_token_ids": "abc"}', 'prompt_token_ids: expected a list of integers, not "abc"'),
    ('{"prompt_token_ids": [1, "2"]}', 'prompt_token_ids: expected a list of integers, not [1, "'),
    ('{"prompt_token_ids": [true]}', "prompt_token_ids: expected a list of integers, not [true]"),
    ('{"prompt_token_ids": []}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt_token_ids": [5, 300]}', f"token id 300 lies outside the vocabulary of {VOCAB_SIZE}"),
    ('{"prompt_token_ids": [-1]}', "token id -1 lies outside the vocabulary"),
    ('{"prompt_token_ids": [4294967297]}', "token id 4294967297 lies outside the vocabulary"),
    ('{"messages": "hello"}', 'messages: expected a list of at least one message, not "hello"'),
    ('{"messages": []}', "messages: expected a list of at least one message, not []"),
    ('{"messages": ["hello"]}', 'messages[0]: expected an object, not "hello"'),
    ('{"messages": [{"role": "user"}]}', "messages[0].content: expected a text, or a list of"),
    (
        '{"messages": [{"role": 1, "content": ""}]}',
        "messages[0].role: expected one of system",
    ),
    ('{"prompt": "a", "id": 1.5}', "id: expected a text or an integer, not 1.5"),
    ('{"prompt": "a", "id": null}', "id: expected a text or an integer, not null"),
    ('{"prompt": "a", "id": 1}', "duplicate id: record 1 has it (one without an id has its num"),
    ('{"prompt": "a", "window_size": 5}', "window_size: expected 0 to 4, the engine's own, not 5"),
    (
        '{"prompt": "a", "window_size": -1}',
        "window_size: expected 0 to 4, the engine's own, not -1",
    ),
    ('{"prompt": "a", "window_size": true}', "window_size: expected an integer, not true"),
    ('{"prompt": "a", "sampling": {"window_size": 2}}', "window_size: expected beside sampling"),
    ('{"prompt": "a", "sampling": {"seed": -2}}', "sampling.seed: expected an integer from 0 to"),
    ('{"prompt": "a", "sampling": 5}', "sampling: expected an object, not 5"),
    ('{"prompt": "a", "sampling": {"temprature": 1}}', "did you mean 'temperature'?"),
    (
        '{"prompt": "a", "sampling": {"top_p": 1.5}}',
        "sampling.top_p: expected a number above 0, up",
    ),
    ('{"prompt": "a", "sampling": {"temperature": "hot"}}', "sampling.temperature: expected a num"),
    ('{"prompt": "a", "sampling": {"temperature": 1e999}}', "sampling.temperature: expected a num"),
    ('{"prompt": "a", "sampling": {"max_tokens": 0}}', "sampling.max_tokens: expected an integer"),
    ('{"prompt": "a", "sampling": {"stop": 5}}', "sampling.stop: expected a text or a list"),
    ('{"prompt": "a", "sampling": {"stop": [""]}}', "sampling.stop: expected non-empty strings"),
    ('{"prompt": "a", "sampling": {"stop_token_ids": 5}}', "sampling.stop_token_ids: expected a"),
    ('{"prompt": "a", "sampling": {"stop_token_ids": [300]}}', "stop_token_ids: 300 is outside"),
    ('{"prompt": "a", "sampling": {"max_tokens": 320}}', "exceed max_model_len 320"),
    ('{"prompt": "a", "sampling": {"n": 0}}', "sampling.n: expected an integer from 1 to 128"),
    ('{"prompt": "a", "sampling": {"n": 2}}', "sampling.n: expected 1 at temperature 0, where"),
    ('{"prompt": "a", "sampling": {"logprobs": 21}}', "sampling.logprobs: expected an integer fr"),
]


def own_id(line: str) -> str | int | None:
    """The id that a line has, if any can be read."""
    try:
        return record_id(record_fields(line.encode()), 1)
    except InputError:
        return None


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_becomes_an_error_row(
    work: Path, model: Path, quick: None, line: str, message: str
) -> None:
    Path("in.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n{{"prompt": "mat"}}\n')
    assert run(model) == 0
    before, bad, after = results()
    assert (before["id"], after["id"]) == (1, 3)
    assert "error" not in {*before, *after}
    name = own_id(line)
    own = ["promt"] if "promt" in line else []
    assert list(bad) == (["error", "line"] if name is None else ["id", "error", "line"]) + own
    assert bad.get("id") == name
    assert message in bad["error"]
    assert len(bad["error"]) < 400
    assert bad["line"] == 3


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_fail_fast_names_a_bad_row_before_anything_runs(
    work: Path,
    model: Path,
    never_decodes: None,
    line: str,
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("in.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
    assert run(model, "--fail-fast") == 2
    out, err = capsys.readouterr()
    assert out == ""
    *notes, said = err.splitlines()
    assert said.startswith("wedlm generate: in.jsonl line 3: ")
    assert message in said
    assert len(said) < 400
    assert all("promt" in note or "output: x" in note for note in notes)
    assert os.listdir() == ["in.jsonl"]


def test_fail_fast_lets_good_rows_pass(work: Path, model: Path, quick: None) -> None:
    write(words(8))
    assert run(model, "--fail-fast") == 0
    assert len(results()) == 8


@pytest.mark.parametrize(
    ("content", "messages"),
    [
        ('{"prompt": "a"}\n'.encode("utf-16"), ["not UTF-8 (UTF-16 or binary data)"] * 2),
        (
            '{"prompt": "naïve"}\n'.encode("latin-1"),
            ["not UTF-8 (byte 14; another encoding or binary)"],
        ),
        (b'{"prompt": "a"}\n{"prompt": "\0"}\n', [None, "not UTF-8 (UTF-16 or binary data)"]),
        (b"\x1f\x8b\x08\x00binary", ["not UTF-8 ("]),
    ],
)
def test_files_that_are_no_text(
    work: Path, model: Path, quick: None, content: bytes, messages: list[str | None]
) -> None:
    Path("in.jsonl").write_bytes(content)
    assert run(model) == (0 if None in messages else BAD_DATA)
    for record, message in zip(results(), messages, strict=True):
        assert record.get("error", "").startswith(message or "")
        assert ("error" in record) == (message is not None)


def test_the_first_row_with_an_id_has_it(work: Path, model: Path, quick: None) -> None:
    write(
        [
            {"id": "1", "prompt": "a"},
            {"prompt": "a"},
            {"id": 2, "prompt": "a"},
            {"id": "x"},
            {"id": "x", "prompt": "a"},
            {"id": "1", "prompt": "b"},
            {"prompt": "c"},
        ]
    )
    assert run(model, "--shard-size", "2") == 0
    rows = results()
    assert [record["id"] for record in rows] == ["1", 2, 2, "x", "x", "1", 7]
    assert [record.get("line") for record in rows] == [None, None, 3, 4, 5, 6, None]
    for number, original in ((2, 2), (4, 4), (5, 1)):
        assert f"duplicate id: record {original} has it" in rows[number]["error"]


def test_a_line_longer_than_any_row_is_read_past(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "LARGEST_LINE", 64)
    exact = {"prompt": "x" * (64 - len(lines([{"prompt": ""}])))}
    assert len(lines([exact])) == 64
    write([{"prompt": "a"}, {"prompt": "x" * 300}, exact, {"prompt": "b"}, {"prompt": "x" * 500}])
    assert run(model, "--shard-size", "2") == 0
    rows = results()
    assert ["error" in record for record in rows] == [False, True, False, False, True]
    assert rows[1] == {"error": "too long (more than 0 MiB in a line)", "line": 2}
    assert [record.get("id") for record in rows] == [1, None, 3, 4, None]


def test_what_a_tokenizer_cannot_take_ends_no_job(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = LLM.prepare_one

    def failing(self: LLM, prompt: Any, params: Any, **options: Any) -> Any:
        if prompt == "mat":
            raise TypeError("no\nsuch luck \ud83d")
        return prepare(self, prompt, params, **options)

    monkeypatch.setattr(LLM, "prepare_one", failing)
    write(words(8))
    assert run(model) == 0
    (bad,) = (record for record in results() if "error" in record)
    assert bad["id"] == 6
    reason = "the prompt could not be turned into tokens (TypeError: no such luck \\ud83d)"
    assert bad["error"] == reason


def test_error_rows_are_counted_and_told(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    write([{"prompt": 1}, {"prompt": "a"}, {"prompt": 2}])
    assert run(model, output="out") == 0
    summary = capsys.readouterr().err.splitlines()[-1]
    assert summary.startswith("out: 3 records (2 bad, with an error instead of a result), ")
    manifest = json.loads(Path("out/rows-00000-of-00001.manifest.json").read_bytes())
    stats = json.loads(Path("out/stats.json").read_bytes())
    for counts in (manifest["counts"], stats):
        assert (counts["rows"], counts["error_rows"]) == (3, 2)


@pytest.mark.parametrize("output", ["out", os.fsdecode(b"caf\xe9.jsonl")])
def test_names_of_files_that_are_not_text(
    work: Path, model: Path, quick: None, output: str
) -> None:
    Path("in").mkdir()
    write(words(2), "in/a.jsonl")
    Path(os.fsdecode(b"in/caf\xe9.jsonl")).write_bytes(lines([{"promt": "a"}]))
    assert run(model, input="in", output=output) == 0
    good, _, bad = results(output)
    assert "error" not in good
    assert (bad["file"], bad["line"]) == ("caf\\udce9.jsonl", 1)


def test_a_record_that_fails_while_it_decodes_becomes_an_error_record(
    model: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one whose grammar grows beyond its limits."""

    def failing(
        llm: LLM,
        prompts: Iterable[Prepared],
        *arguments: Any,
        on_failure: Callable[[int, InputError], None],
        **options: Any,
    ) -> Iterator[list[tuple[int, Completion]]]:
        for batch in quick_run(llm, prompts, *arguments, **options):
            for place, _ in batch:
                if place == 1:
                    on_failure(place, InputError("regex: too large"))
            yield [one for one in batch if one[0] != 1]

    monkeypatch.setattr(LLM, "run", failing)
    write([*words(3), {"prompt": "a", "id": "last"}])
    assert run(model, "--shard-size", "2") == 0
    first, bad, *others = results()
    assert bad == {"id": 2, "error": "regex: too large", "line": 2}
    assert [one["id"] for one in (first, *others)] == [1, 3, "last"]
    assert all("text" in one for one in (first, *others))
