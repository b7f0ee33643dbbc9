"""A request's fields follow from those of `SamplingParams`; a bad one is named in the answer."""

import dataclasses
import json

import httpx2
import openai
import pytest

from infer.serve.errors import ApiError
from infer.serve.fields import (
    IGNORED,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    check_refused,
    sampling_given,
    sampling_of,
)
from tests.infer.serve.running_server import MODEL
from wedlm_jax.params import OPTIONS, SamplingParams

MESSAGES = [{"role": "user", "content": "x"}]


def params_of(fields, kind=CompletionRequest, defaults=None):
    asked = {"prompt": "x"} if kind is CompletionRequest else {"messages": MESSAGES}
    given = sampling_given(kind(**asked, **fields))
    return sampling_of(given, defaults or SamplingParams(seed=None), 1000)


def test_every_field_of_sampling_is_a_field_of_both():
    for model in (CompletionRequest, ChatRequest):
        assert set(OPTIONS) <= set(model.model_fields)
        schema = model.model_json_schema()["properties"]
        for name, option in OPTIONS.items():
            if (model, name) != (ChatRequest, "logprobs"):
                assert schema[name]["description"] == option.help
                least = "exclusiveMinimum" if option.above else "minimum"
                assert schema[name].get(least) == option.low


SAME_AS_SAMPLING_PARAMS = [
    {"temperature": 1, "top_k": -1, "stop": "x", "logprobs": 0, "seed": 7, "ignore_eos": True},
    {"temperature": 0.5, "stop": ["x", "y"], "stop_token_ids": [1, 2]},
    {"logit_bias": {"5": 3, "6": -2.5}, "bad_words": ["a", [1, 2]]},
    {"mode": "paper", "entropy_threshold": None},
    {"entropy_threshold": 0.2},
    {"json_schema": {"type": "object"}},
    {"regex": "a+"},
]
SCHEMA = {"type": "array", "items": {"type": "integer"}}
NAMED = {"name": "numbers", "strict": True, "schema": SCHEMA}
JSON_OBJECT = {"type": "json_object"}
BY_OTHER_NAMES = [
    ({"response_format": {"type": "text"}}, {}),
    ({"response_format": JSON_OBJECT}, {"json_schema": {"type": "object"}}),
    (
        {"response_format": {"type": "json_schema", "json_schema": NAMED}},
        {"json_schema": SCHEMA},
    ),
    ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
    ({"structured_outputs": {"json": '{"type": "array"}'}}, {"json_schema": {"type": "array"}}),
    ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"n": 3}, {"n": 3, "temperature": 1}),  # as in OpenAI's API
    ({"n": 3, "temperature": 0.2}, {"n": 3, "temperature": 0.2}),
]
OF_CHATS = [
    ({"max_completion_tokens": 7}, {"max_tokens": 7}),
    ({"logprobs": True}, {"logprobs": 0}),
    ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
    ({"logprobs": False}, {}),
]


def test_a_value_means_what_it_means_to_sampling_params():
    both = [*((one, one) for one in SAME_AS_SAMPLING_PARAMS), *BY_OTHER_NAMES]
    for fields, params in both:
        expected = SamplingParams(**{"seed": None, "max_tokens": 1000} | params)
        assert params_of(fields) == expected
        of_chat = fields | ({"logprobs": True} if "logprobs" in fields else {})
        assert params_of(of_chat, ChatRequest) == expected
    for fields, params in OF_CHATS:
        expected = SamplingParams(**{"seed": None, "max_tokens": 1000} | params)
        assert params_of(fields, ChatRequest) == expected


def test_what_is_null_or_not_given_is_as_the_server_says():
    defaults = SamplingParams(temperature=0.7, seed=3, mode="paper")
    expected = dataclasses.replace(defaults, top_k=3, max_tokens=1000)
    for kind in (CompletionRequest, ChatRequest):
        for name in OPTIONS.keys() - {"entropy_threshold", "seed", "top_k"}:
            assert params_of({"top_k": 3, name: None}, kind, defaults) == expected, name


def test_what_is_not_supported_may_be_given_if_it_asks_for_nothing():
    for name, neutral in REFUSED.items():
        for value in (None, *neutral):
            check_refused(ChatRequest(messages=MESSAGES, **{name: value}))
        with pytest.raises(ApiError, match=f"{name}: not supported") as refused:
            check_refused(ChatRequest(messages=MESSAGES, **{name: {"type": "function"}}))
        assert (refused.value.status, refused.value.param) == (400, name)
    assert params_of({name: {"any": ["thing"]} for name in IGNORED}) == params_of({})


# --- refusals, over HTTP ------------------------------------------------------------------

PROMPT = "prompt: expected a text, a list of token ids, a list of texts, or a list of lists of"
NOT = {"not": {}}


TEXT_FIELDS = [
    ({"temperature": -1}, "temperature: expected a number from 0 to 1,000,000"),
    ({"temperature": True}, "temperature: input should be a valid number"),
    ({"top_k": 1.0}, "top_k: input should be a valid integer"),
    ({"ignore_eos": 1}, "ignore_eos: input should be a valid boolean"),
    ({"temprature": 1}, "unknown field 'temprature'; did you mean 'temp"),
    ({"max_tokens": 9999}, "max_tokens 9999 exceed max_model_len 1024"),
    ({"prompt": "cat " * 2000}, "exceed max_model_len 1024"),
    ({"prompt": []}, "prompt: expected at least one"),
    ({"prompt": ""}, "the prompt has no tokens"),
    ({"prompt": {"a": 1}}, PROMPT),
    ({"prompt": None}, PROMPT),
    ({"prompt": [5, 99999]}, "token id 99999 lies outside the vocabulary"),
    ({"prompt": "\ud800"}, "not UTF-8"),
    ({"mode": "fast"}, "mode: input should be 'paper', 'verified' or 'ar'"),
    ({"window_size": 9}, "window_size: expected 0 to 8"),
    ({"stop": 7}, "stop: input should be a valid string"),
    ({"stream_options": {}}, "stream_options: expected stream to be true"),
    ({"stream": "yes"}, "stream: input should be a valid boolean"),
]
CHAT_FIELDS = [
    ({"messages": []}, "messages: list should have at least 1 item"),
    ({"messages": "hello"}, "messages: input should be a valid list"),
    ({"tools": [{"type": "function"}]}, "chat template does not support them"),
    ({"tools": "count"}, "tools: input should be a valid list"),
    ({"tool_choice": "required"}, "input should be 'none' or 'auto'"),
    ({"chat_template_kwargs": {"tokenize": False}}, "'tokenize' cannot be set there"),
    ({"top_logprobs": 3}, "top_logprobs: expected logprobs to be true"),
    (
        {"top_logprobs": 99, "logprobs": True},
        "top_logprobs: expected an integer from 0 to 20, not 99",
    ),
    ({"max_completion_tokens": 3, "max_tokens": 3}, "means the same as max_tokens"),
    ({"max_completion_tokens": 0}, "max_tokens: expected an integer of at least 1"),
    ({"prompt": "x"}, "unknown field 'prompt'"),
    # Formats, by the name that the body gives them.
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": NOT}}},
        'json_schema: Unimplemented keys: ["not"]',
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format: expected json_schema"),
    ({"response_format": JSON_OBJECT, "json_schema": SCHEMA}, "means the same as json_schema"),
    ({"response_format": JSON_OBJECT, "mode": "paper"}, "json_schema: expected mode"),
    ({"structured_outputs": {"json": NOT}}, 'json_schema: Unimplemented keys: ["not"]'),
    ({"regex": "a", "response_format": JSON_OBJECT}, "regex: cannot be combined"),
    ({"structured_outputs": {"regex": "(?=a)"}}, "regex: look-around"),
]
IMAGE = {"role": "user", "content": [{"type": "image_url"}]}
BAD_MESSAGES = [
    ({"role": "user"}, "content", "messages[0].content: expected a text"),
    ({"role": "king", "content": "x"}, "role", "messages[0].role: expected one of system, "),
    (IMAGE, "content.0", "messages[0].content[0]: 'image_url' is not supported; "),
]
PLACES = "37 completions are requested; this server takes 36 at most"
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
REFUSALS = [
    *(
        (TEXT, {"max_tokens": 4} | fields, next(iter(fields)), sentence)
        for fields, sentence in TEXT_FIELDS
    ),
    *((CHAT, fields, next(iter(fields)), sentence) for fields, sentence in CHAT_FIELDS),
    *(
        (CHAT, {"messages": [one]}, f"messages.0.{at}", sentence)
        for one, at, sentence in BAD_MESSAGES
    ),
    (TEXT, {"n": 37}, None, PLACES),
    (TEXT, {"stop_token_ids": ["a"]}, "stop_token_ids.0", "input should be a valid integer"),
]


def refused(server, call, content, kind="application/json"):
    """The status of what is no call, and the error."""
    method, path = call.split()
    headers = {"Content-Type": kind}
    answer = httpx2.request(method, server.url + path, content=content, headers=headers)
    return answer.status_code, answer.json()["error"]


@pytest.mark.parametrize(("path", "fields", "param", "sentence"), REFUSALS)
def test_a_bad_field_is_named(server, path, fields, param, sentence):
    body = ({"prompt": "the cat"} if path == TEXT else {"messages": MESSAGES}) | fields
    # In ASCII: half a character is no UTF-8.
    status, error = refused(server, f"POST {path}", json.dumps(body))
    assert (status, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert sentence in error["message"]


NO_CALLS = [
    (400, f"POST {TEXT}", b"{", "not valid JSON"),
    (400, f"POST {TEXT}", b"", "expected a JSON object"),
    (400, f"POST {TEXT}", b"[1]", "expected a JSON object"),
    (400, f"POST {TEXT}", b'{"prompt": "x", "temperature": NaN}', "temperature"),
    (400, f"POST {TEXT}", b'{"prompt": "x", "temperature": 1e999}', "temperature"),
    (400, f"POST {TEXT}", b"[" * 100_000, "not valid JSON (it is nested too deeply)"),
    (400, f"POST {TEXT}", b"\xff\xfe\x00", "not valid JSON (it is not UTF-8 text)"),
    (400, f"POST {TEXT}", b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", ""),
    (404, "POST /v1/embeddings", b"{}", "POST /v1/embeddings"),
    (405, f"GET {TEXT}", b"", f"GET {TEXT}"),
]


def test_what_is_no_call_is_told(server):
    for expected, call, body, sentence in NO_CALLS:
        status, error = refused(server, call, body)
        assert status == expected
        assert sentence in error["message"]
    status, error = refused(server, f"POST {TEXT}", b'{"prompt": "x"}', "text/plain")
    assert (status, error["message"][:22]) == (400, "expected a JSON object")


def test_openai_s_exceptions(client):
    ask = client.completions.create
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=MODEL, prompt=[5] * 2000)
    assert (bad.value.param, bad.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here") as bad:
        ask(model="gpt", prompt="x")
    assert bad.value.code == "model_not_found"
