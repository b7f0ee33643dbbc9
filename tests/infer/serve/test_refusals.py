"""What the server refuses, as exceptions of OpenAI's client and as the body that they come from."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import openai
import pytest
from openai import OpenAI

from tests.infer.serve.running_server import MODEL, RunningServer, running_server
from wedlm_jax.llm import LLM

PLAIN = {"prompt": "the cat", "max_tokens": 4}
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"temperature": -1}, "temperature", "temperature: expected a number from 0 to 1,000,000"),
        ({"temperature": "warm"}, "temperature", "temperature: input should be a valid number"),
        ({"temperature": True}, "temperature", "temperature: input should be a valid number"),
        (
            {"temprature": 1},
            "temprature",
            "unknown field 'temprature'; did you mean 'temp",
        ),
        ({"max_tokens": 0}, "max_tokens", "max_tokens: expected an integer of at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "max_tokens: input should be a valid integer"),
        ({"max_tokens": 9999}, "max_tokens", "max_tokens 9999 exceed max_model_len 1024"),
        ({"prompt": "cat " * 2000}, "prompt", "exceed max_model_len 1024"),
        ({"prompt": []}, "prompt", "prompt: expected at least one"),
        ({"prompt": ""}, "prompt", "the prompt has no tokens"),
        ({"prompt": {"a": 1}}, "prompt", "prompt: expected a text, a list of token ids, a list"),
        ({"prompt": ["a", [5]]}, "prompt", "prompt: expected a text, a list of token ids, a list"),
        ({"prompt": [5, "a"]}, "prompt", "prompt: expected a text, a list of token ids, a list"),
        ({"prompt": [5, 99999]}, "prompt", "token id 99999 lies outside the vocabulary"),
        ({"prompt": None}, "prompt", "prompt: expected a text, a list of token ids"),
        ({"prompt": "\ud800"}, "prompt", "not UTF-8"),
        ({"mode": "fast"}, "mode", "mode: input should be 'paper', 'verified' or 'ar'"),
        ({"window_size": 9}, "window_size", "window_size: expected 0 to 8"),
        ({"window_size": -1}, "window_size", "window_size: expected 0 to 8"),
        ({"n": 2, "temperature": 0}, "n", "n: expected 1 at temperature 0"),
        ({"n": 37}, None, "37 completions are asked for; this server takes 36 at most"),
        ({"min_tokens": 5}, "min_tokens", "min_tokens: expected at most max_tokens"),
        ({"stop": [""]}, "stop", "stop: expected non-empty strings"),
        ({"stop": 7}, "stop", "stop: input should be a valid string"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "logit_bias: expected an object of token ids"),
        ({"logprobs": 21}, "logprobs", "logprobs: expected an integer from 0 to 20"),
        ({"suffix": "end"}, "suffix", "suffix: not supported"),
        ({"echo": True}, "echo", "echo: not supported"),
        ({"best_of": 3}, "best_of", "best_of: not supported"),
        ({"stream_options": {}}, "stream_options", "stream_options: expected stream to be true"),
        ({"stream": "yes"}, "stream", "stream: input should be a valid boolean"),
    ],
)
def test_a_bad_field_is_named(
    server: RunningServer, fields: dict[str, Any], param: str | None, sentence: str
) -> None:
    # In ASCII: half a character is no UTF-8.
    body = json.dumps(PLAIN | fields)
    response = httpx2.post(f"{server.url}/v1/completions", content=body, headers=JSON)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert sentence in error["message"]


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"messages": []}, "messages", "messages: list should have at least 1 item"),
        ({"messages": "hello"}, "messages", "messages: input should be a valid list"),
        (
            {"messages": [{"role": "user"}]},
            "messages.0.content",
            "messages[0].content: expected a text",
        ),
        (
            {"messages": [{"role": "king", "content": "x"}]},
            "messages.0.role",
            "messages[0].role: expected one of system, developer, user, assistant, tool, function",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages.0.content.0",
            "messages[0].content[0]: 'image_url' is not taken; this model reads texts alone",
        ),
        ({"tools": [{"type": "function"}]}, "tools", "chat template does not write any"),
        ({"tools": "count"}, "tools", "tools: input should be a valid list"),
        ({"tool_choice": "required"}, "tool_choice", "input should be 'none' or 'auto'"),
        (
            {"chat_template_kwargs": {"tokenize": False}},
            "chat_template_kwargs",
            "chat_template_kwargs: 'tokenize' cannot be set there",
        ),
        ({"top_logprobs": 3}, "top_logprobs", "top_logprobs: expected logprobs to be true"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_completion_tokens", "another name"),
        ({"max_completion_tokens": 9999}, "max_completion_tokens", "exceed max_model_len 1024"),
        ({"prompt": "x"}, "prompt", "unknown field 'prompt'"),
    ],
)
def test_a_bad_field_of_a_chat_is_named(
    server: RunningServer, fields: dict[str, Any], param: str, sentence: str
) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], **fields}
    response = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert sentence in error["message"]


def test_null_is_as_good_as_nothing(server: RunningServer) -> None:
    names = ["temperature", "top_p", "n", "max_tokens", "stop", "seed", "logit_bias", "tools"]
    body = {"messages": [{"role": "user", "content": "Count from 1 to 3."}]}
    one, other = (
        httpx2.post(f"{server.url}/v1/chat/completions", json=body | more).json()
        for more in ({}, dict.fromkeys(names))
    )
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        (b"{", "application/json", "not valid JSON"),
        (b"", "application/json", "expected a JSON object"),
        (b"[1]", "application/json", "expected a JSON object"),
        (b'{"prompt": "x"}', "text/plain", "expected a JSON object"),
        (b'{"prompt": "x", "temperature": NaN}', "application/json", "temperature"),
        (b'{"prompt": "x", "temperature": 1e999}', "application/json", "temperature"),
        (b"[" * 100_000, "application/json", "not valid JSON (it is nested too deeply)"),
        (b"\xff\xfe\x00", "application/json", "not valid JSON (it is not text in UTF-8)"),
        (b'{"prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}", "application/json", ""),
    ],
)
def test_a_body_that_is_no_request(
    server: RunningServer, body: bytes, kind: str, sentence: str
) -> None:
    response = httpx2.post(
        f"{server.url}/v1/completions", content=body, headers={"Content-Type": kind}
    )
    assert response.status_code == 400, response.text
    assert sentence in response.json()["error"]["message"]


def test_openai_s_exceptions(client: OpenAI) -> None:
    ask = client.completions.create
    with pytest.raises(openai.BadRequestError, match="top_p") as bad:
        ask(model=MODEL, prompt="x", top_p=2)
    assert bad.value.param == "top_p"
    with pytest.raises(openai.BadRequestError) as bad:
        ask(model=MODEL, prompt=[5] * 2000)
    assert bad.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt' here") as bad:
        ask(model="gpt", prompt="x")
    assert bad.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="POST /v1/embeddings"):
        client.embeddings.create(model=MODEL, input="x")


def test_a_path_or_a_method_that_is_not_there(server: RunningServer) -> None:
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/completions", 405)):
        response = httpx2.request(method, server.url + path)
        assert response.status_code == status
        assert path in response.json()["error"]["message"]


def test_a_key_is_wanted_where_one_is_set(offline: LLM) -> None:
    with running_server(offline, api_key="s3cret") as server:
        for key in ("wrong", "", "s3cre", "s3cret2"):
            with (
                OpenAI(base_url=f"{server.url}/v1", api_key=key or "-", max_retries=0) as client,
                pytest.raises(openai.AuthenticationError, match="expected the server's API key"),
            ):
                client.models.list()
        with OpenAI(base_url=f"{server.url}/v1", api_key="s3cret") as client:
            client.models.list()
        open_paths = ("/", "/health")
        for path in (*open_paths, "/metrics", "/v1/models", "/openapi.json", "/nowhere"):
            status = httpx2.get(server.url + path).status_code
            assert status == (200 if path in open_paths else 401)
        for scheme in ("Basic s3cret", "s3cret", "Bearer"):
            answer = httpx2.get(f"{server.url}/metrics", headers={"Authorization": scheme})
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"


def test_pages_of_other_origins_are_let_in_only_where_named(
    server: RunningServer, offline: LLM
) -> None:
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    asked = httpx2.options(f"{server.url}/v1/completions", headers=ask)
    assert "access-control-allow-origin" not in asked.headers
    with running_server(offline, cors_origins=("https://a.example",), api_key="k") as other:
        for path in ("/v1/completions", "/v1/chat/completions"):
            asked = httpx2.options(other.url + path, headers=ask)
            assert asked.headers["access-control-allow-origin"] == "https://a.example"
        wrong = httpx2.options(
            f"{other.url}/v1/completions", headers=ask | {"Origin": "https://b.example"}
        )
        assert "access-control-allow-origin" not in wrong.headers
        refused = httpx2.get(f"{other.url}/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
