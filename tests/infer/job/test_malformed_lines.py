"""A thousand malformed lines, a hundred of every kind, are a thousand error rows."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any

import pytest

from tests.examples.tiny_checkpoint import VOCAB_SIZE
from tests.infer.job.job_examples import results, run


def anything(draw: random.Random, depth: int = 0) -> Any:
    """A JSON value, of any type and of awkward sizes."""
    kinds = ["null", "bool", "int", "float", "text"] + ["list", "object"] * (depth < 3)
    match draw.choice(kinds):
        case "bool":
            return draw.random() < 0.5
        case "int":
            return draw.choice([0, -1, 2**31, 2**63, 2**64, -(10**40), draw.randint(-300, 300)])
        case "float":
            return draw.choice([0.5, -1e300, 1e-300, 3.0, -0.0])
        case "text":
            return draw.choice(["", "a", "\0", "\u2028", "日本", "\ufffd", "x" * 5000])
        case "list":
            return [anything(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        case "object":
            keys = ["role", "content", "prompt", "temperature", "stop", "", "é"]
            return {draw.choice(keys): anything(draw, depth + 1) for _ in range(draw.randint(0, 3))}
    return None


GOOD = '{"id": "q", "prompt": "the cat", "sampling": {"top_k": 5, "stop": ["x"]}}'


def no_json(draw: random.Random) -> bytes:
    cut = GOOD[: draw.randrange(1, len(GOOD) - 1)]
    return draw.choice([cut, GOOD + cut, f"{{{cut}", f"'{GOOD}'", cut[1:] or "x"]).encode()


def no_text(draw: random.Random) -> bytes:
    garbage = bytes(draw.randrange(128, 256) for _ in range(draw.randint(1, 40)))
    raw = bytes(b for b in draw.randbytes(40) if b not in b"\n\r\t \x0b\x0c")
    return draw.choice([garbage + b"\xff", GOOD.encode("utf-16-be"), b"\0" + raw])


def no_object(draw: random.Random) -> bytes:
    value = anything(draw)
    return json.dumps([value] if isinstance(value, dict) else value).encode()


def wrong_prompt(draw: random.Random) -> bytes:
    kind = draw.choice(["prompt", "prompt_token_ids", "messages"])
    value = anything(draw)
    while (kind == "prompt" and isinstance(value, str) and value) or (
        kind == "prompt_token_ids" and isinstance(value, list) and value
    ):
        value = anything(draw)
    if kind == "prompt_token_ids" and draw.random() < 0.5:
        value = draw.choice([[-1], [5, VOCAB_SIZE], [2**63], [10**30], [1.0], ["5"], [None], [[]]])
    return json.dumps({"id": draw.random().hex(), kind: value}).encode()


def wrong_sampling(draw: random.Random) -> bytes:
    wrong = [
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
    name, values = draw.choice(wrong)
    sampling: Any = {name: draw.choice(values)}
    if draw.random() < 0.3:
        sampling = {"".join(draw.choices(string.ascii_letters + "_é", k=draw.randint(0, 80))): 1}
    elif draw.random() < 0.2:
        sampling = draw.choice([5, "hot", [sampling]])
    return json.dumps({"prompt": "the cat", "sampling": sampling}).encode()


def wrong_keys(draw: random.Random) -> bytes:
    key = draw.choice(["promt", "Prompt", "", "x" * 10_000, "text", "\0", "日本"])
    record = draw.choice(
        [
            {key: "a"},
            {"prompt": "a", key: json.loads("[" * 200 + "]" * 200)},
            {"prompt": "a", draw.choice(["text", "error", "line"]): anything(draw)},
            {},
            {"id": draw.random().hex()},
            {"prompt": "a", "messages": []},
            {"prompt": "a", "prompt_token_ids": [5]},
        ]
    )
    return json.dumps(record).encode()


def wrong_id(draw: random.Random) -> bytes:
    value = anything(draw)
    while isinstance(value, str | int) and not isinstance(value, bool):
        value = anything(draw)
    return json.dumps({"id": value, "prompt": "the cat"}).encode()


def odd_json(draw: random.Random) -> bytes:
    return draw.choice(
        [
            b"[" * draw.randint(1, 100_000),
            b'{"a":' * draw.randint(1, 50_000),
            b"[" * 900 + b"]" * 900,
            b'{"prompt": "\\ud800"}',
            b'{"prompt": "a\\udc00b"}',
            b'{"prompt": NaN}',
            b'{"prompt": -Infinity}',
            b'{"id": ' + b"9" * 5000 + b"}",
            b'{"prompt": "a", "prompt": "b"}',
            b'{"prompt": "a", "sampling": {"seed": 1, "seed": 1}}',
            b'{"prompt": "a\tb"}',
            b'{"prompt": "\\x"}',
            b"\xef\xbb\xbf{}",
            b'{"prompt": "a"},',
        ]
    )


def too_long(draw: random.Random) -> bytes:
    words = " ".join(draw.choices(["cat", "mat", "日本", "1"], k=draw.randint(900, 4000)))
    return json.dumps({"prompt": words}).encode()


def wrong_messages(draw: random.Random) -> bytes:
    message = draw.choice(
        [
            {"role": "user"},
            {"content": "a"},
            {"role": 5, "content": "a"},
            "a",
            None,
            [],
            {"role": "user", "content": ["a"]},
            {"role": "user", "content": None},
        ]
    )
    good = {"role": "user", "content": "a"}
    return json.dumps({"messages": draw.choice([[message], [good, message], message])}).encode()


KINDS = (
    no_json,
    no_text,
    no_object,
    wrong_prompt,
    wrong_sampling,
    wrong_keys,
    wrong_id,
    odd_json,
    too_long,
    wrong_messages,
)


@pytest.mark.full
def test_a_thousand_malformed_lines_are_a_thousand_error_rows(
    work: Path, model: Path, quick: None
) -> None:
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
