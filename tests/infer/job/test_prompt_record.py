"""Records that are read: bad ones, which become error records, and requests to OpenAI's API."""

import json
import os
import random
import string
from pathlib import Path

import pytest
from openai.types import Completion as TextCompletion
from openai.types.chat import ChatCompletion

from infer.job.prompt_record import record_fields, record_id, record_seed
from tests.examples.tiny_checkpoint import VOCAB_SIZE
from tests.infer.job.job_examples import (
    KEYS,
    lines,
    quick_run,
    results,
    run,
    words,
    write,
)
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
    ('{"messages": [{"role": 1, "content": ""}]}', "messages[0].role: expected one of system"),
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


def own_id(line):
    """The id that a line has, if any can be read."""
    try:
        return record_id(record_fields(line.encode()), 1)
    except InputError:
        return None


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
def test_a_bad_row_becomes_an_error_row(model, quick, line, message):
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
    model, never_decodes, line, message, capsys
):
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


def test_fail_fast_lets_good_rows_pass(model, quick):
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
def test_files_that_are_no_text(model, quick, content, messages):
    Path("in.jsonl").write_bytes(content)
    assert run(model) == (0 if None in messages else BAD_DATA)
    for record, message in zip(results(), messages, strict=True):
        assert record.get("error", "").startswith(message or "")
        assert ("error" in record) == (message is not None)


def test_the_first_row_with_an_id_has_it(model, quick):
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


def test_error_rows_are_counted_and_told(model, quick, capsys):
    write([{"prompt": 1}, {"prompt": "a"}, {"prompt": 2}])
    assert run(model, output="out") == 0
    summary = capsys.readouterr().err.splitlines()[-1]
    assert summary.startswith("out: 3 records (2 bad, with an error instead of a result), ")
    manifest = json.loads(Path("out/rows-00000-of-00001.manifest.json").read_bytes())
    stats = json.loads(Path("out/stats.json").read_bytes())
    for counts in (manifest["counts"], stats):
        assert (counts["rows"], counts["error_rows"]) == (3, 2)


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
    assert chats[0].choices[0].message.content == one.text
    assert chats[0].choices[0].logprobs is not None
    assert len(chats[0].choices[0].logprobs.content or []) == len(one.token_ids)
    assert chats[0].model == "any"
    assert chats[0].usage is not None
    assert chats[0].usage.completion_tokens == len(one.token_ids)
    assert chats[0].usage.prompt_tokens == len(llm.chat_prompt(TURNS))
    two = SamplingParams(temperature=1, n=2, max_tokens=6, seed=record_seed(0, "b"))
    (drawn,) = llm.chat(TURNS, two)
    assert [choice.message.content for choice in chats[1].choices] == [
        s.text for s in drawn.samples
    ]
    (three,) = llm.generate("one two", SamplingParams(max_tokens=4))
    assert texts[0].choices[0].text == three.text
    assert bodies[2]["choices"][0]["token_ids"] == three.token_ids
    (four,) = llm.generate([70, 80], SamplingParams(max_tokens=24, stop="zzz"))
    assert texts[1].choices[0].text == four.text
    assert texts[2].choices[0].logprobs is not None

    tokens = sum(body["usage"]["completion_tokens"] for body in bodies) + len(plain["token_ids"])
    assert f"6 records, {tokens} tokens" in capsys.readouterr().err


BAD = [
    (chat("x") | {"url": "/v1/embeddings"}, "url: expected /v1/chat/completions or /v1/complet"),
    (chat("x") | {"method": "GET"}, 'method: expected POST, not "GET"'),
    (chat("x") | {"body": None}, "body: expected an object, not null"),
    (chat("x") | {"priority": 1}, "unknown key 'priority'"),
    (chat("x", temprature=1), "unknown field 'temprature'; did you mean 'temperature'"),
    (chat("x", top_p=2), "top_p: expected a number above 0, up"),
    (chat("x", max_tokens="5"), "max_tokens: input should be a valid integer"),
    (chat("x", messages=[{"role": "king", "content": ""}]), "messages[0].role: expected one of"),
    (chat("x", messages=[]), "messages: list should have at least 1 item"),
    (chat("x", stream=True), "stream: not in a job"),
    (chat("x", tools=[{"type": "function"}]), "tools: this checkpoint's chat template does not"),
    (chat("x", max_tokens=400), "exceed max_model_len 320"),
    (chat("x", window_size=5), "window_size: expected 0 to 4, the engine's own, not 5"),
    (text("x", "a", echo=True), "echo: not supported"),
    (text("x", ["a", "b"]), "prompt: expected one in a record, not 2"),
    (text(7, "a"), "custom_id: expected a text, not 7"),
]


def test_a_bad_request_has_its_error_in_the_place_of_an_answer(model, quick, capsys):
    records = [{**record, "custom_id": f"{i}"} for i, (record, _) in enumerate(BAD[:-1])]
    write([*records, BAD[-1][0], text("0", "again")])
    assert run(model) == BAD_DATA
    found = results()
    for (_, said), answer in zip([*BAD, (None, "duplicate id: record 1 has")], found, strict=True):
        assert answer["response"]["status_code"] == 400
        error = answer["response"]["body"]["error"]
        assert error["type"] == "invalid_request_error"
        assert said in error["message"]
    assert f"({len(found)} bad," in capsys.readouterr().err


def test_a_prompt_may_have_keys_of_these_names_of_its_own(model, quick):
    mine = {"custom_id": "mine", "url": "https://example.com", "body": 5, "response": "no"}
    write([{"prompt": "a", **mine}, {"prompt": 5, **mine}])
    assert run(model) == 0
    record, bad = results()
    assert list(bad) == ["id", "error", "line", *mine]
    assert (record["custom_id"], record["body"], record["id"]) == ("mine", 5, 1)


@pytest.mark.parametrize("field", [{"seed": -1}, {"window_size": 4}])
def test_a_seed_of_minus_one_is_none_and_a_window_is_its_own(model, quick, field):
    def answer(**given):
        write([text("a", "b", temperature=1, **given)])
        assert run(model, "--overwrite", "--seed", "5") == 0
        return str(results()[0]["response"]["body"]["choices"][0]["text"])

    (name,) = field
    assert (answer() == answer(**field)) == (name == "seed")
    assert answer(**{name: 3}) != answer(**field)


def anything(draw, depth=0):
    """A JSON value, of any type and of awkward sizes."""
    size = draw.randint(0, 3)
    match draw.choice(["null", "bool", "number", "text"] + ["list", "object"] * (depth < 3)):
        case "bool":
            return draw.random() < 0.5
        case "number":
            return draw.choice([0, -1, 2**31, 2**63, 2**64, -(10**40), 0.5, -1e300, 1e-300, -0.0])
        case "text":
            return draw.choice(["", "a", "\0", "\u2028", "日本", "\ufffd", "x" * 5000])
        case "list":
            return [anything(draw, depth + 1) for _ in range(size)]
        case "object":
            keys = draw.sample(["role", "content", "prompt", "stop", "", "é"], size)
            return {key: anything(draw, depth + 1) for key in keys}
    return None


GOOD = '{"id": "q", "prompt": "the cat", "sampling": {"top_k": 5, "stop": ["x"]}}'
WRONG_SAMPLING = [
    ("temperature", [-1, "0", None, [], True, 1e7]),
    ("top_p", [0, 2, "x", None, {}]),
    ("top_k", [-2, 0.5, None, "5", False]),
    ("max_tokens", [0, -5, 1e3, 10**30, 320, None]),
    ("stop", [5, [""], [5], None, {}, [[]]]),
    ("stop_token_ids", [5, [-1], [300], ["a"], None]),
    ("entropy_threshold", [-1, "none", []]),
    ("position_penalty", [-1, None, 1e9, "a"]),
    ("seed", [-2, 2**32, 0.5, "1"]),
]
WRONG_MESSAGES = [
    *({"role": "user"}, {"content": "a"}, {"role": 5, "content": "a"}, "a", None, []),
    *({"role": "user", "content": ["a"]}, {"role": "user", "content": None}),
]
ODD_JSON = [
    *(b"[" * 100_000, b'{"a":' * 50_000, b"[" * 900 + b"]" * 900, b'{"prompt": "a"},'),
    *(b'{"prompt": "\\ud800"}', b'{"prompt": "a\\udc00b"}', b'{"prompt": NaN}'),
    *(b'{"prompt": -Infinity}', b'{"id": ' + b"9" * 5000 + b"}", b'{"prompt": "a", "prompt": "b"}'),
    *(b'{"prompt": "a", "sampling": {"seed": 1, "seed": 1}}', b'{"prompt": "a\tb"}'),
    *(b'{"prompt": "\\x"}', b"\xef\xbb\xbf{}"),
]


def no_json(draw):
    cut = GOOD[: draw.randrange(1, len(GOOD) - 1)]
    return draw.choice([cut, GOOD + cut, f"{{{cut}", f"'{GOOD}'", cut[1:] or "x"]).encode()


def no_text(draw):
    garbage = bytes(draw.randrange(128, 256) for _ in range(draw.randint(1, 40)))
    raw = bytes(b for b in draw.randbytes(40) if b not in b"\n\r\t \x0b\x0c")
    return draw.choice([garbage + b"\xff", GOOD.encode("utf-16-be"), b"\0" + raw])


def no_object(draw):
    value = anything(draw)
    return json.dumps([value] if isinstance(value, dict) else value).encode()


def wrong_prompt(draw):
    kind = draw.choice(["prompt", "prompt_token_ids", "messages"])
    value = anything(draw)
    while (kind == "prompt" and isinstance(value, str) and value) or (
        kind == "prompt_token_ids" and isinstance(value, list) and value
    ):
        value = anything(draw)
    if kind == "prompt_token_ids" and draw.random() < 0.5:
        value = draw.choice([[-1], [5, VOCAB_SIZE], [2**63], [10**30], [1.0], ["5"], [None], [[]]])
    return json.dumps({"id": draw.random().hex(), kind: value}).encode()


def wrong_sampling(draw):
    name, values = draw.choice(WRONG_SAMPLING)
    sampling = {name: draw.choice(values)}
    if draw.random() < 0.3:
        sampling = {"".join(draw.choices(string.ascii_letters + "_é", k=draw.randint(0, 80))): 1}
    elif draw.random() < 0.2:
        sampling = draw.choice([5, "hot", [sampling]])
    return json.dumps({"prompt": "the cat", "sampling": sampling}).encode()


def wrong_keys(draw):
    key = draw.choice(["promt", "Prompt", "", "x" * 10_000, "text", "\0", "日本"])
    deep, mine = json.loads("[" * 200 + "]" * 200), draw.choice(["text", "error", "line"])
    records = [
        *({key: "a"}, {"prompt": "a", key: deep}, {"prompt": "a", mine: anything(draw)}, {}),
        *({"id": draw.random().hex()}, {"prompt": "a", "messages": []}),
        {"prompt": "a", "prompt_token_ids": [5]},
    ]
    return json.dumps(draw.choice(records)).encode()


def wrong_id(draw):
    value = anything(draw)
    while isinstance(value, str | int) and not isinstance(value, bool):
        value = anything(draw)
    return json.dumps({"id": value, "prompt": "the cat"}).encode()


def odd_json(draw):
    return draw.choice(ODD_JSON)


def too_long(draw):
    words = " ".join(draw.choices(["cat", "mat", "日本", "1"], k=draw.randint(900, 4000)))
    return json.dumps({"prompt": words}).encode()


def wrong_messages(draw):
    message, good = draw.choice(WRONG_MESSAGES), {"role": "user", "content": "a"}
    return json.dumps({"messages": draw.choice([[message], [good, message], message])}).encode()


KINDS = (
    *(no_json, no_text, no_object, odd_json, wrong_id),
    *(wrong_prompt, wrong_sampling, wrong_keys, wrong_messages, too_long),
)


@pytest.mark.full
def test_a_thousand_malformed_lines_are_a_thousand_error_rows(model, quick):
    draw = random.Random(0)
    malformed = [KINDS[i % len(KINDS)](draw) for i in range(1000)]
    assert all(line.strip() and b"\n" not in line for line in malformed)
    content = []
    for i, line in enumerate(malformed):
        content.append(line)
        if i % 100 == 99:
            content.append(b'{"id": "good %d", "prompt": "a"}' % i)
    Path("in.jsonl").write_bytes(b"\n".join(content))
    assert run(model, "--shard-size", "64") == 0
    rows = results()
    assert len(rows) == 1010
    good = [record for record in rows if "error" not in record]
    assert [record["id"] for record in good] == [f"good {i}" for i in range(99, 1000, 100)]
    for line, record in enumerate(rows, 1):
        if "error" in record:
            assert record["line"] == line
            assert 5 < len(record["error"]) < 400, record
            assert "could not be turned into tokens" not in record["error"], "every kind is known"
    assert len({record["error"] for record in rows if "error" in record}) > 150
