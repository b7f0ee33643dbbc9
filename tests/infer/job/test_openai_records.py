"""Records in the form of OpenAI's batch files: requests in, answers out, which its client reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from infer.job.prompt_record import record_seed
from tests.infer.job.job_examples import KEYS, contents, results, run, stop_after, write
from wedlm_jax.errors import BAD_DATA
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

TURNS = [{"role": "user", "content": [{"type": "text", "text": "the cat"}]}]


def chat(name: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "any", "messages": TURNS} | body
    url = "/v1/chat/completions"
    return {"custom_id": name, "method": "POST", "url": url, "body": body}


def text(name: Any, prompt: Any, **body: Any) -> dict[str, Any]:
    body = {"model": "any", "prompt": prompt, **body}
    return {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body}


def test_answers_are_those_of_the_model_in_the_form_of_the_api(
    work: Path, model: Path, llm: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
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
    texts = [Completion.model_validate(body) for body in bodies[2:]]

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


BAD: list[tuple[dict[str, Any], str]] = [
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


def test_a_bad_request_has_its_error_in_the_place_of_an_answer(
    work: Path, model: Path, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_a_job_that_goes_on_gives_the_same_answers(
    work: Path, model: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write([chat(f"q{i}", temperature=1, max_tokens=9) for i in range(9)])
    assert run(model, "--shard-size", "2", output="whole") == 0
    stop_after(2, KeyboardInterrupt(), monkeypatch)
    assert run(model, "--shard-size", "2", output="out") == 130
    assert run(model, "--shard-size", "2", output="out") == 0
    assert contents("out") == contents("whole")


def test_a_prompt_may_have_keys_of_these_names_of_its_own(
    work: Path, model: Path, quick: None
) -> None:
    mine = {"custom_id": "mine", "url": "https://example.com", "body": 5, "response": "no"}
    write([{"prompt": "a", **mine}, {"prompt": 5, **mine}])
    assert run(model) == 0
    record, bad = results()
    assert list(bad) == ["id", "error", "line", *mine]
    assert (record["custom_id"], record["body"], record["id"]) == ("mine", 5, 1)


@pytest.mark.parametrize("field", [{"seed": -1}, {"window_size": 4}])
def test_a_seed_of_minus_one_is_none_and_a_window_is_its_own(
    work: Path, model: Path, quick: None, field: dict[str, int]
) -> None:
    def answer(**given: int) -> str:
        write([text("a", "b", temperature=1, **given)])
        assert run(model, "--overwrite", "--seed", "5") == 0
        return str(results()[0]["response"]["body"]["choices"][0]["text"])

    (name,) = field
    assert (answer() == answer(**field)) == (name == "seed")
    assert answer(**{name: 3}) != answer(**field)
