"""Records that are read: bad ones, which become error records, and requests to OpenAI's API."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from infer.job.input import Place, Record, RecordIndex, Workload
from infer.job.prompt_record import KEYS as KEYS_READ
from infer.job.prompt_record import (
    PROMPT_KINDS,
    SAMPLING_FIELDS,
    record_fields,
    record_id,
    record_seed,
)
from tests.examples.tiny_checkpoint import VOCAB_SIZE
from tests.infer.job.job_examples import KEYS, lines, quick_run, results, run, words, write
from wedlm_jax.errors import BAD_DATA, InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
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
    ('{"prompt": "a", "line": 1}', "'line' is a key of output records, to which this record's own"),
    ('{"prompt": "a", "x": %s}' % ("[" * 900 + "]" * 900), "nested more than 100 deep"),
    ('{"id": "q"}', "expected exactly one of prompt, prompt_token_ids, messages, not none"),
    ('{"prompt": "a", "messages": []}', ", not prompt and messages"),
    ('{"prompt": 5}', "prompt: expected a text, not 5"),
    ('{"prompt": ""}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt": "half \\ud83d"}', "half of a surrogate pair"),
    ('{"prompt_token_ids": [1, "2"]}', 'prompt_token_ids: expected a list of integers, not [1, "'),
    ('{"prompt_token_ids": [true]}', "prompt_token_ids: expected a list of integers, not [true]"),
    ('{"prompt_token_ids": []}', "the prompt has no tokens; at least one is needed"),
    ('{"prompt_token_ids": [5, 300]}', f"token id 300 lies outside the vocabulary of {VOCAB_SIZE}"),
    ('{"messages": "hello"}', 'messages: expected a list of at least one message, not "hello"'),
    ('{"messages": [{"role": 1, "content": ""}]}', "messages[0].role: expected one of system"),
    ('{"prompt": "a", "id": 1.5}', "id: expected a text or an integer, not 1.5"),
    ('{"prompt": "a", "id": 1}', "duplicate id: record 1 has it (one without an id has its num"),
    (
        '{"prompt": "a", "window_size": 5}',
        "window_size: expected 0 to 4, the engine's widest, not 5",
    ),
    ('{"prompt": "a", "window_size": true}', "window_size: expected an integer, not true"),
    ('{"prompt": "a", "sampling": {"window_size": 2}}', "window_size: expected next to sampling"),
    ('{"prompt": "a", "sampling": 5}', "sampling: expected an object, not 5"),
    ('{"prompt": "a", "sampling": {"temprature": 1}}', "did you mean 'temperature'?"),
    (
        '{"prompt": "a", "sampling": {"top_p": 1.5}}',
        "sampling.top_p: expected a number above 0, up",
    ),
    (
        '{"prompt": "a", "sampling": {"temperature": 1e999}}',
        "sampling.temperature: expected a finite num",
    ),
    (
        '{"prompt": "a", "sampling": {"stop": 5}}',
        "sampling.stop: expected non-empty strings, not 5",
    ),
    (
        '{"prompt": "a", "sampling": {"stop_token_ids": 5}}',
        "sampling.stop_token_ids: expected token ids, not 5",
    ),
    ('{"prompt": "a", "sampling": {"stop_token_ids": [300]}}', "stop_token_ids: 300 is outside"),
    ('{"prompt": "a", "sampling": {"max_tokens": 320}}', "exceed max_model_len 320"),
    ('{"prompt": "a", "sampling": {"n": 2}}', "sampling.n: expected 1 at temperature 0, where"),
]


def test_a_bad_row_becomes_an_error_row(model, quick):
    bad_lines, messages = zip(*BAD_LINES, strict=True)
    Path("in.jsonl").write_text("\n".join(['{"prompt": "a"}', "", *bad_lines, '{"prompt": "mat"}']))
    assert run(model) == 0
    before, *bad, after = results()
    assert (before["id"], after["id"]) == (1, len(BAD_LINES) + 2)
    assert "error" not in {*before, *after}
    for number, (line, message, record) in enumerate(zip(bad_lines, messages, bad, strict=True), 3):
        try:
            known = {"id": record_id(record_fields(line.encode()), number - 2)}
        except InputError:
            known = {}
        assert message in record["error"]
        assert len(record["error"]) < 400
        passed_on = {"promt": "a"} if "promt" in line else {}
        expected = {**known, "error": record["error"], "line": number, **passed_on}
        assert list(record.items()) == list(expected.items())


def test_fail_fast_names_a_bad_row_before_anything_runs(model, never_decodes, capsys):
    for kind in ("{", "temprature", "prompt_token_ids", "duplicate id"):
        line, message = next(one for one in BAD_LINES if kind in " ".join(one))
        Path("in.jsonl").write_text(f'{{"prompt": "a"}}\n\n{line}\n', encoding="utf-8")
        assert run(model, "--fail-fast") == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith("wedlm generate: in.jsonl line 3: ")
        assert message in err
        assert os.listdir() == ["in.jsonl"]
    write(words(8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LLM, "run", quick_run)
        assert run(model, "--fail-fast") == 0
    assert len(results()) == 8


def test_files_that_are_no_text(model, quick):
    binary = "not UTF-8 (UTF-16 or binary data)"
    latin = "not UTF-8 (byte 14; another encoding or binary)"
    for content, messages in (
        ('{"prompt": "a"}\n'.encode("utf-16"), [binary] * 2),
        ('{"prompt": "naïve"}\n'.encode("latin-1"), [latin]),
        (b'{"prompt": "a"}\n{"prompt": "\0"}\n', [None, binary]),
        (b"\x1f\x8b\x08\x00binary", ["not UTF-8 ("]),
    ):
        Path("in.jsonl").write_bytes(content)
        assert run(model, "--overwrite") == (0 if None in messages else BAD_DATA)
        for record, message in zip(results(), messages, strict=True):
            assert record.get("error", "").startswith(message or "")
            assert ("error" in record) == (message is not None)


def test_a_line_longer_than_any_row_is_read_past(model, quick, monkeypatch):
    monkeypatch.setattr(jsonl, "LARGEST_LINE", 64)
    exact = {"prompt": "x" * (64 - len(lines([{"prompt": ""}])))}
    assert len(lines([exact])) == 64
    write([{"prompt": "a"}, {"prompt": "x" * 300}, exact, {"prompt": "b"}, {"prompt": "x" * 500}])
    assert run(model, "--shard-size", "2") == 0
    rows = results()
    assert ["error" in record for record in rows] == [False, True, False, False, True]
    assert rows[1] == {"error": "too long (more than 0 MiB in a line)", "line": 2}
    assert [record.get("id") for record in rows] == [1, None, 3, 4, None]


def test_what_a_tokenizer_cannot_take_ends_no_job(model, quick, monkeypatch):
    prepare = LLM.prepare_one

    def failing(self, prompt, params, **options):
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


@pytest.mark.parametrize("output", ["out", os.fsdecode(b"caf\xe9.jsonl")])
def test_names_of_files_that_are_not_text(model, quick, output):
    Path("in").mkdir()
    write(words(2), "in/a.jsonl")
    Path(os.fsdecode(b"in/caf\xe9.jsonl")).write_bytes(lines([{"promt": "a"}]))
    assert run(model, input="in", output=output) == 0
    good, _, bad = results(output)
    assert "error" not in good
    assert (bad["file"], bad["line"]) == ("caf\\udce9.jsonl", 1)


def test_a_record_that_fails_while_it_decodes_becomes_an_error_record(model, monkeypatch):
    """Such as one whose grammar grows beyond its limits."""

    def failing(llm, prompts, *arguments, on_failure, **options):
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


TURNS = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]


def chat(name, **body):
    body = {"model": "any", "messages": TURNS} | body
    url = "/v1/chat/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text(name, prompt, **body):
    body = {"model": "any", "prompt": prompt, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def test_answers_are_those_of_the_model_in_the_form_of_the_api(model, llm, capsys):
    write(
        [
            chat("a", max_completion_tokens=5, logprobs=True, top_logprobs=2),
            chat("b", temperature=1, n=2, max_tokens=6, seed=None),
            text("c", "one two", max_tokens=4, return_token_ids=True),
            text("d", [70, 80], stop=["zzz"]),
            text("e", ["mat"], logprobs=1, max_tokens=3),
            {"id": "own", "prompt": "a"},
        ]
    )
    assert run(model) == 0
    *answers, plain = results()
    assert list(plain) == KEYS
    assert [answer["custom_id"] for answer in answers] == ["a", "b", "c", "d", "e"]
    assert len({answer["id"] for answer in answers}) == 5
    assert all(answer["error"] is None for answer in answers)
    assert [answer["response"]["status_code"] for answer in answers] == [200] * 5
    bodies = [answer["response"]["body"] for answer in answers]
    chats = [ChatCompletion.model_validate(body) for body in bodies[:2]]
    texts = [TextCompletion.model_validate(body) for body in bodies[2:]]

    (one,) = llm.chat(TURNS, SamplingParams(max_tokens=5, logprobs=2))
    (choice,), usage = chats[0].choices, chats[0].usage
    assert (choice.message.content, chats[0].model) == (one.text, "any")
    assert len(choice.logprobs.content) == usage.completion_tokens == len(one.token_ids)
    assert usage.prompt_tokens == len(llm.chat_prompt(TURNS))
    two = SamplingParams(temperature=1, n=2, max_tokens=6, seed=record_seed(0, "b"))
    (drawn,) = llm.chat(TURNS, two)
    assert [one.message.content for one in chats[1].choices] == [s.text for s in drawn.samples]
    (three,) = llm.generate("one two", SamplingParams(max_tokens=4))
    assert bodies[2]["choices"][0]["token_ids"] == three.token_ids
    (four,) = llm.generate([70, 80], SamplingParams(max_tokens=24, stop="zzz"))
    assert [texts[i].choices[0].text for i in range(2)] == [three.text, four.text]
    assert texts[2].choices[0].logprobs is not None

    tokens = sum(body["usage"]["completion_tokens"] for body in bodies) + len(plain["token_ids"])
    assert f"6 records, {tokens} tokens" in capsys.readouterr().err


BAD = [
    (chat("x") | {"url": "/v1/embeddings"}, "url: expected /v1/chat/completions or /v1/complet"),
    (chat("x") | {"method": "GET"}, 'method: expected POST, not "GET"'),
    (chat("x") | {"body": None}, "body: expected an object, not null"),
    (chat("x") | {"priority": 1}, "unknown key 'priority'"),
    (chat("x", top_p=2), "top_p: expected a number above 0, up"),
    (chat("x", max_tokens="5"), "max_tokens: input should be a valid integer"),
    (chat("x", stream=True), "stream: not allowed in a job"),
    (chat("x", tools=[{"type": "function"}]), "tools: this checkpoint's chat template does not"),
    (chat("x", max_tokens=400), "exceed max_model_len 320"),
    (text("x", "a", echo=True), "echo: not supported"),
    (text("x", ["a", "b"]), "prompt: expected one per record, not 2"),
    (text(7, "a"), "custom_id: expected a text, not 7"),
]


def test_a_bad_request_has_its_error_in_the_place_of_an_answer(model, quick, capsys):
    records = [{**record, "custom_id": f"{i}"} for i, (record, _) in enumerate(BAD[:-1])]
    write([*records, BAD[-1][0], text("0", "again")])
    assert run(model) == BAD_DATA
    found = results()
    for (_, message), answer in zip(
        [*BAD, (None, "duplicate id: record 1 has")], found, strict=True
    ):
        assert answer["response"]["status_code"] == 400
        error = answer["response"]["body"]["error"]
        assert error["type"] == "invalid_request_error"
        assert message in error["message"]
    assert f"({len(found)} bad, with an error instead of a result), " in capsys.readouterr().err


def test_a_prompt_may_have_keys_of_these_names_of_its_own(model, quick):
    mine = {"custom_id": "mine", "url": "https://example.com", "body": 5, "response": "no"}
    write([{"prompt": "a", **mine}, {"prompt": 5, **mine}])
    assert run(model) == 0
    record, bad = results()
    assert list(bad) == ["id", "error", "line", *mine]
    assert (record["custom_id"], record["body"], record["id"]) == ("mine", 5, 1)


def test_a_seed_of_minus_one_is_none_and_a_window_is_its_own(model, quick):
    def answer(**given):
        write([text("a", "b", temperature=1, **given)])
        assert run(model, "--overwrite", "--seed", "5") == 0
        return results()[0]["response"]["body"]["choices"][0]["text"]

    assert answer(seed=-1) == answer()
    assert len({answer(), answer(seed=3), answer(window_size=4), answer(window_size=3)}) == 4


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
SAMPLING = st.fixed_dictionaries({}, optional=dict.fromkeys(SAMPLING_FIELDS, JSON))
OBJECTS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys([*KEYS_READ, "text", "promt", "custom_id", "url", "body"], JSON)
    | {"prompt": JSON | st.just("a"), "sampling": JSON | SAMPLING},
)
OPTIONS = st.fixed_dictionaries({}, optional={"sampling": JSON | SAMPLING, "id": JSON})
PROMPTS = st.dictionaries(st.sampled_from(PROMPT_KINDS), JSON, min_size=1, max_size=1)
GOOD_PROMPTS = st.just({"prompt": "a"})
RECORDS = st.tuples(PROMPTS | GOOD_PROMPTS, OPTIONS).map(lambda parts: parts[0] | parts[1])
WHOLE = (JSON | OBJECTS | RECORDS | PROMPTS).map(json.dumps)
LINES = WHOLE.map(str.encode) | WHOLE.map(lambda line: line[:-1].encode()) | st.binary()


@settings(max_examples=20 * settings.default.max_examples)
@given(LINES)
def test_whatever_a_line_holds_it_decodes_or_is_refused_in_a_sentence(llm, line):
    nothing = np.array([], np.int64)
    index = RecordIndex(1, "", (), 1, (), nothing, nothing)
    workload = Workload([], index, SamplingParams(max_tokens=24), False)
    try:
        prompt, params, *_ = workload.prepare(llm, Record(0, Place(0, 0, 1)), line)
    except InputError as bad:
        reason = str(bad)
    else:
        assert len(prompt) > 0 < params.max_tokens
        return
    assert 5 < len(reason) < 400
    assert "could not be turned into tokens" not in reason, "every kind is known"
