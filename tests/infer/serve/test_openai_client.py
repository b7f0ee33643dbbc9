"""The API as OpenAI's own client sees it, unchanged: every route, whole and streamed; what it gets
is what `LLM` says without a server."""

import re

import pytest

from tests.docs.pages import ROOT, blocks
from tests.examples.schemas import fits
from tests.infer.serve.running_server import MODEL
from wedlm_jax.params import SamplingParams

QUESTION = "Count from 12 to 40 in steps of 2."
MESSAGES = [{"role": "user", "content": QUESTION}]
STORY = "Once upon a time"


@pytest.fixture(scope="module")
def answer(offline):
    """What the model says to the question, which it knows."""
    (answer,) = offline.chat(MESSAGES, SamplingParams(max_tokens=200))
    assert "12, 14, 16" in answer.text
    assert answer.finish_reason == "stop"
    return answer


def chat(client, messages=MESSAGES, **fields):
    return both_ways(client.chat.completions, messages=messages, **fields)


def complete(client, prompt=STORY, **fields):
    return both_ways(client.completions, prompt=prompt, **fields)


def both_ways(route, **fields):
    """The whole answer; a stream of the same brings it in pieces."""
    reply = route.create(model=MODEL, **fields)
    with_usage = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, closing = route.create(model=MODEL, **fields, **with_usage)
    assert {chunk.id for chunk in chunks} == {closing.id}
    assert (closing.choices, {chunk.usage for chunk in chunks}) == ([], {None})
    assert closing.usage.completion_tokens == reply.usage.completion_tokens
    for number, choice in enumerate(reply.choices):
        assert choice.index == number
        pieces = [one for chunk in chunks for one in chunk.choices if one.index == number]
        assert "".join(map(text_of, pieces)) == text_of(choice)
        *before, last = (one.finish_reason for one in pieces)
        assert (set(before) <= {None}, last) == (True, choice.finish_reason)
        logprobs = [one.logprobs for one in pieces if one.logprobs is not None]
        if choice.logprobs is not None:
            name = "text_offset" if hasattr(choice, "text") else "content"
            joined = [token for piece in logprobs for token in getattr(piece, name)]
            assert joined == getattr(choice.logprobs, name)
    return reply


def text_of(choice):
    if hasattr(choice, "text"):
        return choice.text
    message = choice.delta if hasattr(choice, "delta") else choice.message
    return message.content or ""


# --- chats -------------------------------------------------------------------------------


def test_a_chat(client, offline, answer):
    reply = chat(client)
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content) == ("assistant", answer.text)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (reply.model, reply.object, reply.id[:9]) == (MODEL, "chat.completion", "chatcmpl-")
    prompt, tokens, usage = len(offline.chat_prompt(MESSAGES)), len(answer.token_ids), reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (prompt, tokens)
    assert usage.total_tokens == prompt + tokens
    assert usage.model_extra == {
        "num_forwards": answer.num_forwards,
        "num_token_instances": answer.num_token_instances,
        "drafts": answer.drafts._asdict(),
    }


def test_the_program_of_the_docs(server, answer, capsys):
    (block,) = blocks("python", pages=[ROOT / "docs" / "serve.md"])
    program = block.text.replace("http://localhost:8000", server.url)
    assert '"wedlm-embedded"' in program
    exec(compile(program.replace("wedlm-embedded", MODEL), block.name, "exec"), {})
    assert capsys.readouterr().out.strip() == answer.text


def test_a_stream_comes_in_pieces_and_without_usage_ends_with_the_text(client):
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
    opening, *pieces, last = (chunk.choices[0] for chunk in stream)
    assert opening.delta.role == "assistant"
    assert len(pieces) > 1
    assert last.finish_reason == "stop"


def test_an_answer_s_message_may_come_back_and_parts_and_roles_of_openai_s(client, offline, answer):
    message = chat(client).choices[0].message
    parts = [{"type": "text", "text": "Count "}, {"type": "text", "text": "on."}]
    more = {"role": "user", "content": "Go on."}
    messages = [{"role": "developer", "content": "Be short."}, {"role": "user", "content": parts}]
    reply = chat(client, [*messages, message, more], max_completion_tokens=8)
    plain = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Count on."},
        {"role": "assistant", "content": message.content},
        more,
    ]
    (expected,) = offline.chat(plain, SamplingParams(max_tokens=8))
    assert reply.choices[0].message.content == expected.text
    usage = chat(client, [*MESSAGES, message, more], max_tokens=4).usage
    # Of what was asked and replied before, the cache has all but what the last page did not fill.
    assert usage.prompt_tokens > usage.prompt_tokens_details.cached_tokens > len(answer.token_ids)


def test_log_probabilities_of_a_chat(client, offline):
    (expected,) = offline.chat(MESSAGES, SamplingParams(max_tokens=12, logprobs=3))
    (choice,) = chat(client, logprobs=True, top_logprobs=3, max_tokens=12).choices
    content = choice.logprobs.content
    assert "".join(token.token for token in content) == expected.text
    assert all(bytes(token.bytes).decode() == token.token for token in content)
    for token, one in zip(content, expected.logprobs, strict=True):
        assert token.logprob == pytest.approx(one.logprob)
        tops = [other.logprob for other in token.top_logprobs]
        assert tops == pytest.approx([value for _, value in one.top])


def test_an_answer_by_a_schema_or_an_expression(client, offline):
    schema = {
        "type": "object",
        "properties": {"first": {"type": "integer", "maximum": 99}, "up": {"type": "boolean"}},
        "required": ["first", "up"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "count", "schema": schema}}
    (choice,) = chat(client, response_format=form).choices
    (expected,) = offline.chat(MESSAGES, SamplingParams(json_schema=schema))
    assert (choice.finish_reason, choice.message.content) == ("stop", expected.text)
    assert fits(expected.text, schema)
    regex = "(yes|no), [0-9]{2}"
    (choice,) = chat(client, extra_body={"structured_outputs": {"regex": regex}}).choices
    assert re.fullmatch(regex, choice.message.content)


# --- completions --------------------------------------------------------------------------


def test_a_completion_of_a_text_or_of_its_tokens(client, offline):
    (expected,) = offline.generate(STORY, SamplingParams(max_tokens=48))
    ids = list(offline.as_ids(STORY))
    for prompt in (STORY, ids, [ids]):
        asked = {"max_tokens": 48, "extra_body": {"return_token_ids": True}}
        reply = complete(client, prompt, **asked)
        assert reply.object == "text_completion"
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason) == (expected.text, expected.finish_reason)
        assert choice.model_extra == {"token_ids": expected.token_ids}


@pytest.mark.full
def test_many_prompts_and_samples_come_in_order(client, offline):
    prompts = [STORY, "One day", "The cat"]
    asked = {"max_tokens": 16, "temperature": 0.7, "n": 2, "seed": 5}
    rows = offline.generate(prompts, SamplingParams(**asked))
    expected = [one for row in rows for one in row.samples]
    reply = complete(client, prompts, **asked)
    assert [choice.text for choice in reply.choices] == [one.text for one in expected]
    assert len({one.text for one in expected}) > 3
    assert reply.usage.prompt_tokens == sum(len(offline.as_ids(prompt)) for prompt in prompts)
    assert reply.usage.completion_tokens == sum(len(one.token_ids) for one in expected)


def test_log_probabilities_of_a_completion(client, offline):
    params = SamplingParams(max_tokens=12, logprobs=2, ignore_eos=True)
    (expected,) = offline.generate(STORY, params)
    asked = {"max_tokens": 12, "logprobs": 2, "extra_body": {"ignore_eos": True}}
    (choice,) = complete(client, **asked).choices
    logprobs = choice.logprobs
    assert logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs])
    assert "".join(token for token in logprobs.tokens if token != "<|im_end|>") == choice.text
    assert [len(top) for top in logprobs.top_logprobs] == [2] * 12


def test_a_narrower_window_takes_more_forwards_for_the_same_answer(client, answer):
    replies = [chat(client, extra_body={"window_size": window}) for window in (8, 2, 0)]
    assert {one.choices[0].message.content for one in replies} == {answer.text}
    wide, narrow, ar = (one.usage.num_forwards for one in replies)
    assert wide < narrow < ar == len(answer.token_ids)


def test_models(client):
    (model,) = client.models.list().data
    assert model.id == MODEL
    assert client.models.retrieve(MODEL) == model
