"""The API as OpenAI's own client sees it, unchanged: every route, whole and streamed; what it gets
is what `LLM` says without a server."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.docs.pages import ROOT, blocks
from tests.examples.schemas import fits
from tests.infer.serve.running_server import MODEL, RunningServer
from wedlm_jax.completion import Completion
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

QUESTION = "Count from 12 to 40 in steps of 2."
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
STORY = "Once upon a time"
PARAMS = SamplingParams(max_tokens=48)


@pytest.fixture(scope="module")
def answer(offline: LLM) -> Completion:
    """What the model says to the question, which it knows."""
    (answer,) = offline.chat(MESSAGES, SamplingParams(max_tokens=200))
    assert answer.text is not None
    assert "12, 14, 16" in answer.text
    assert answer.finish_reason == "stop"
    return answer


# --- chats -------------------------------------------------------------------------------


def test_a_chat(client: OpenAI, offline: LLM, answer: Completion) -> None:
    said = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    (choice,) = said.choices
    assert (choice.message.role, choice.message.content) == ("assistant", answer.text)
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (said.model, said.object, said.id[:9]) == (MODEL, "chat.completion", "chatcmpl-")
    assert said.usage is not None
    prompt, tokens = len(offline.chat_prompt(MESSAGES)), len(answer.token_ids)
    usage = said.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, tokens)
    assert usage.total_tokens == prompt + tokens
    assert usage.model_extra == {
        "num_forwards": answer.num_forwards,
        "num_token_instances": answer.num_token_instances,
        "drafts": answer.drafts._asdict(),
    }


def test_the_program_of_the_docs(
    server: RunningServer, answer: Completion, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = blocks("python", pages=[ROOT / "docs" / "serve.md"])
    program = block.text.replace("http://localhost:8000", server.url)
    assert '"wedlm-embedded"' in program
    exec(compile(program.replace("wedlm-embedded", MODEL), block.name, "exec"), {})
    assert capsys.readouterr().out.strip() == answer.text


def test_a_streamed_chat(client: OpenAI, answer: Completion) -> None:
    stream = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
    )
    opening, *chunks, closing = stream
    assert opening.choices[0].delta.role == "assistant"
    assert len(chunks) > 1, "it comes in pieces"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.text
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    assert {chunk.id for chunk in (opening, *chunks, closing)} == {opening.id}
    assert closing.choices == []
    assert closing.usage is not None
    assert closing.usage.completion_tokens == len(answer.token_ids)
    assert all(chunk.usage is None for chunk in chunks)


def test_a_stream_without_usage_ends_with_the_text(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True))
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_what_was_said_before_is_in_the_cache(client: OpenAI, answer: Completion) -> None:
    further: Any = [
        *MESSAGES,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "Again."},
    ]
    said = client.chat.completions.create(model=MODEL, messages=further, max_tokens=4)
    assert said.usage is not None
    assert said.usage.prompt_tokens_details is not None
    cached = said.usage.prompt_tokens_details.cached_tokens
    # All of the first turn but what the last page did not fill.
    assert cached is not None
    assert said.usage.prompt_tokens > cached > len(answer.token_ids)


def test_an_answer_s_message_may_come_back_and_parts_and_roles_of_openai_s(
    client: OpenAI, offline: LLM
) -> None:
    first = client.chat.completions.create(model=MODEL, messages=MESSAGES)
    more: Any = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "content": [{"type": "text", "text": "Count "}, {"type": "text", "text": "on."}],
        },
        first.choices[0].message,
        {"role": "user", "content": "Go on."},
    ]
    said = client.chat.completions.create(model=MODEL, messages=more, max_completion_tokens=8)
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Count on."},
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Go on."},
    ]
    (expected,) = offline.chat(plain, SamplingParams(max_tokens=8))
    assert said.choices[0].message.content == expected.text


def test_log_probabilities_of_a_chat(client: OpenAI, offline: LLM) -> None:
    params = SamplingParams(max_tokens=12, logprobs=3)
    (expected,) = offline.chat(MESSAGES, params)
    asked: Any = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    said = client.chat.completions.create(model=MODEL, messages=MESSAGES, **asked)
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True, **asked)
    logprobs = said.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert expected.logprobs is not None
    assert [token.logprob for token in logprobs.content] == pytest.approx(
        [one.logprob for one in expected.logprobs]
    )
    assert "".join(token.token for token in logprobs.content) == expected.text
    assert all(bytes(token.bytes or []).decode() == token.token for token in logprobs.content)
    for token, one in zip(logprobs.content, expected.logprobs, strict=True):
        assert [other.logprob for other in token.top_logprobs] == pytest.approx(
            [value for _, value in one.top]
        )
    pieces = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [token for piece in pieces if piece is not None for token in piece.content or []]
    assert streamed == logprobs.content


# --- formats -----------------------------------------------------------------------------


SCHEMA: Any = {
    "type": "object",
    "properties": {"first": {"type": "integer", "maximum": 99}, "up": {"type": "boolean"}},
    "required": ["first", "up"],
    "additionalProperties": False,
}


def test_an_answer_by_a_schema(client: OpenAI, offline: LLM) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMA}}
    said = client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    (expected,) = offline.chat(MESSAGES, SamplingParams(json_schema=SCHEMA))
    assert said.choices[0].finish_reason == "stop"
    assert said.choices[0].message.content == expected.text
    assert fits(expected.text or "", SCHEMA)


def test_an_answer_by_an_expression_streams(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        stream=True,
        extra_body={"structured_outputs": {"regex": "(yes|no), [0-9]{2}"}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert re.fullmatch("(yes|no), [0-9]{2}", text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json_schema": {"not": {}}}, 'json_schema: Unimplemented keys: ["not"]'),
        ({"regex": "(?=a)"}, "regex: look-around"),
        ({"regex": "a", "mode": "paper"}, "regex: expected mode verified or ar"),
    ],
)
def test_what_cannot_be_followed_is_a_bad_request(
    client: OpenAI, fields: Any, message: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields)
    body: Any = refused.value.body
    assert body["message"].startswith(message)
    assert body["param"] == message.partition(":")[0]


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}},
        {"response_format": {"type": "json_object"}, "mode": "paper"},
        {"structured_outputs": {"json": {"not": {}}}},
        {"structured_outputs": {"regex": "(?=a)"}},
        {"max_completion_tokens": 0},
    ],
)
def test_a_refusal_names_the_field_as_it_was_given(client: OpenAI, fields: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, extra_body=fields)
    body: Any = refused.value.body
    assert body["param"] == next(iter(fields))


# --- completions --------------------------------------------------------------------------


def test_a_completion(client: OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate(STORY, PARAMS)
    said = client.completions.create(model=MODEL, prompt=STORY, max_tokens=48)
    assert said.choices[0].text == expected.text
    assert said.choices[0].finish_reason == expected.finish_reason
    assert said.object == "text_completion"
    chunks = client.completions.create(model=MODEL, prompt=STORY, max_tokens=48, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text


@pytest.mark.full
def test_many_prompts_and_samples_come_in_order(client: OpenAI, offline: LLM) -> None:
    prompts = [STORY, "One day", "The cat"]
    params = SamplingParams(max_tokens=16, temperature=0.7, n=2, seed=5)
    expected = [one for row in offline.generate(prompts, params) for one in row.samples]
    asked: Any = {"max_tokens": 16, "temperature": 0.7, "n": 2, "seed": 5}
    said = client.completions.create(model=MODEL, prompt=prompts, **asked)
    assert [choice.text for choice in said.choices] == [one.text for one in expected]
    assert [choice.index for choice in said.choices] == list(range(6))
    assert len({one.text for one in expected}) > 3
    assert said.usage is not None
    assert said.usage.prompt_tokens == sum(len(offline.as_ids(prompt)) for prompt in prompts)
    assert said.usage.completion_tokens == sum(len(one.token_ids) for one in expected)
    texts = [""] * 6
    for chunk in client.completions.create(model=MODEL, prompt=prompts, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [one.text for one in expected]


def test_token_ids_in_and_out(client: OpenAI, offline: LLM) -> None:
    ids = list(offline.as_ids(STORY))
    (expected,) = offline.generate([ids], PARAMS)
    for prompt in (ids, [ids]):
        said = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=48, extra_body={"return_token_ids": True}
        )
        (choice,) = said.choices
        assert choice.model_extra == {"token_ids": expected.token_ids}


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_an_answer_wherever_it_stands(
    client: OpenAI, answer: Completion, stream: bool
) -> None:
    assert answer.text is not None
    stop = answer.text[len(answer.text) // 2 :][:3]
    said: Any = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, stop=stop, stream=stream
    )
    if stream:
        chunks = list(said)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        reason = chunks[-1].choices[0].finish_reason
    else:
        text, reason = said.choices[0].message.content, said.choices[0].finish_reason
    assert (text, reason) == (answer.text[: answer.text.index(stop)], "stop")


def test_log_probabilities_of_a_completion(client: OpenAI, offline: LLM) -> None:
    (expected,) = offline.generate(
        STORY, SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    )
    asked: Any = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "logprobs": 2}
    asked["extra_body"] = {"ignore_eos": True}
    (choice,) = client.completions.create(**asked).choices
    logprobs = choice.logprobs
    assert logprobs is not None
    assert expected.logprobs is not None
    assert logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    tokens = [token for token in logprobs.tokens or [] if token != "<|im_end|>"]
    assert "".join(tokens) == choice.text
    for at, token in zip(logprobs.text_offset or [], logprobs.tokens or [], strict=True):
        assert token == "<|im_end|>" or choice.text[at:].startswith(token)
    assert [len(top) for top in logprobs.top_logprobs or []] == [2] * 12
    streamed = [
        offset
        for chunk in client.completions.create(**asked, stream=True)
        for offset in (chunk.choices[0].logprobs.text_offset or [])
    ]
    assert streamed == logprobs.text_offset


# --- this project's own fields --------------------------------------------------------------


@pytest.mark.parametrize(
    ("extra", "params", "window"),
    [
        ({"mode": "ar"}, SamplingParams(mode="ar"), None),
        ({"window_size": 0}, SamplingParams(mode="ar"), None),
        ({"mode": "paper", "entropy_threshold": 0.1, "position_penalty": 0.5}, None, None),
        ({"mode": "paper", "entropy_threshold": None}, None, None),
        ({"ignore_eos": True, "min_tokens": 40, "top_k": 5, "min_p": 0.1}, None, None),
        pytest.param({"repetition_penalty": 1.3}, None, None, marks=pytest.mark.full),
    ],
)
def test_fields_beyond_openai_s(
    client: OpenAI, offline: LLM, extra: dict[str, Any], params: SamplingParams | None, window: None
) -> None:
    params = params or SamplingParams(**extra)
    (expected,) = offline.chat(MESSAGES, dataclasses.replace(params, max_tokens=40))
    said = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=40, extra_body=extra
    )
    assert said.choices[0].message.content == expected.text
    assert said.usage is not None
    assert (said.usage.model_extra or {})["num_forwards"] == expected.num_forwards


def test_a_narrower_window_takes_more_forwards_for_the_same_answer(
    client: OpenAI, answer: Completion
) -> None:
    forwards = []
    for window in (8, 2):
        said = client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_body={"window_size": window}
        )
        assert said.choices[0].message.content == answer.text
        assert said.usage is not None
        forwards.append((said.usage.model_extra or {})["num_forwards"])
    assert forwards[1] > forwards[0]


# --- models, and many clients -----------------------------------------------------------------


def test_models(client: OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


@pytest.mark.full
def test_thirty_clients_at_once(server: RunningServer, offline: LLM) -> None:
    prompts = [f"{STORY} {number}" for number in range(30)]
    expected = [one.text for one in offline.generate(prompts, SamplingParams(max_tokens=20))]

    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as client:
            said = await asyncio.gather(
                *(
                    client.completions.create(model=MODEL, prompt=prompt, max_tokens=20)
                    for prompt in prompts
                )
            )
        return [one.choices[0].text for one in said]

    assert asyncio.run(ask_all()) == expected
    server.wait_until_idle()
