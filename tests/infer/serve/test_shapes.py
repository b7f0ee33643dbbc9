"""Answers have the shapes of OpenAI's API. Tokens that are parts of characters have true bytes and
a name of their own. To requests made up from the server's own description no answer is a 500, and
every answer fits OpenAI's own types."""

import json

import httpx2
import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection

from infer.serve.app import PATHS
from infer.serve.shapes import LogprobShapes
from tests.infer.serve.conftest import SMALL
from tests.infer.serve.running_server import running_server
from tests.wedlm_jax.test_text import byte_tokenizer, write_tokenizer
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import TextCodec

CODEC = TextCodec.load(EMBEDDED_MODEL)
SHAPES = LogprobShapes(CODEC)


def logprobs(ids):
    return [TokenLogprob(-0.5, [(token_id, -0.5)]) for token_id in ids]


@given(st.text(max_size=12))
def test_bytes_of_tokens_join_to_those_of_the_text(text):
    ids = CODEC.encode(text)
    assert b"".join(map(CODEC.token_bytes, ids)) == text.encode()
    entries = SHAPES.of_chat(ids, logprobs(ids))["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == text.encode()
    assert SHAPES.length(ids) == len(text)


def test_parts_of_characters_have_names_of_their_own():
    first, second, third = CODEC.encode("€")
    pair = [TokenLogprob(-0.5, [(first, -0.5), (second, -1.0), (third, -2.0)])]
    text = SHAPES.of_text([first], pair, 0)
    assert text["tokens"] == ["bytes:\\xe2"]
    assert text["top_logprobs"] == [{"bytes:\\xac": -2.0, "bytes:\\x82": -1.0, "bytes:\\xe2": -0.5}]
    (entry,) = SHAPES.of_chat([first], pair)["content"]
    assert (entry["token"], entry["bytes"]) == ("\\xe2", [0xE2])
    assert [other["token"] for other in entry["top_logprobs"]] == ["\\xe2", "\\x82", "\\xac"]
    whole = CODEC.encode("a€b")
    assert SHAPES.of_text(whole, logprobs(whole), 7)["text_offset"] == [7, 8, 9, 9, 9]
    ids = sorted(CODEC.token_ids)
    assert len(set(SHAPES.of_text(ids, logprobs(ids), 0)["tokens"])) == len(ids)


def test_special_and_unknown_tokens(tmp_path):
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<naïve>"])
    codec = TextCodec.load(write_tokenizer(tmp_path, tokenizer))
    end = tokenizer.token_to_id("<|im_end|>")
    added = tokenizer.token_to_id("<naïve>")
    assert codec.token_bytes(end) == b"<|im_end|>"
    assert codec.token_bytes(added) == "<naïve>".encode()
    assert codec.token_bytes(9999) == b""
    assert LogprobShapes(codec).length([end, added]) == len("<naïve>")


def test_without_a_tokenizer_they_are_numbers():
    for ids in ([5, 12], []):
        assert LogprobShapes(None).of_text(ids, logprobs(ids), 0)["tokens"] == [str(i) for i in ids]


# --- OpenAI's types ----------------------------------------------------------------------

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
TYPES = {TEXT: (Completion, Completion), CHAT: (ChatCompletion, ChatCompletionChunk)}
"""Types of whole answers, and of the chunks of streams."""
HEAD = {"id", "object", "created", "model", "system_fingerprint", "choices"}


def check_answer(path, answer, kind):
    """Checks the shape of an answer to a completion request: whole, streamed, or an error."""
    whole, part = TYPES[path]
    if kind.startswith("text/event-stream"):
        *events, done, end = answer.text.replace(": waiting\n\n", "").split("\n\n")
        assert (answer.status_code, done, end) == (200, "data: [DONE]", "")
        for event in events:
            chunk = json.loads(event.removeprefix("data: "))
            for choice in chunk["choices"]:
                # OpenAI's type of a text's chunk is that of a whole answer, whose reason is known.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            part.model_validate(chunk)
            assert chunk.keys() - {"usage"} == HEAD
        return
    assert kind == "application/json"
    if answer.status_code == 200:
        body = answer.json()
        whole.model_validate(body)
        assert body.keys() == HEAD | {"usage"}
        for choice in body["choices"] if path == CHAT else ():
            assert choice["message"].keys() == {"role", "content", "refusal"}
            assert choice["logprobs"] is None or choice["logprobs"].keys() == {"content", "refusal"}
        return
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert all(isinstance(error[name], str) for name in ("message", "type"))
    assert all(isinstance(error[name], str | None) for name in ("param", "code"))


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"max_tokens": 0}])
def test_answers_fit_openai_s_types(server, more):
    asked = {"n": 2, "temperature": 0.7, "max_tokens": 6, "return_token_ids": True} | more
    messages = [{"role": "user", "content": "Hello"}]
    bodies = {
        TEXT: {"prompt": "Once upon", "logprobs": 2},
        CHAT: {"messages": messages, "logprobs": True, "top_logprobs": 2},
    }
    for path, body in bodies.items():
        answer = httpx2.post(server.url + path, json=body | asked)
        assert answer.status_code == (400 if more == {"max_tokens": 0} else 200)
        check_answer(path, answer, answer.headers["content-type"])


def test_the_other_routes(server):
    models = httpx2.get(f"{server.url}/v1/models").json()
    assert models.keys() == {"object", "data"}
    assert models["object"] == "list"
    (card,) = models["data"]
    Model.model_validate(card)
    assert card["max_model_len"] == 1024
    assert httpx2.get(f"{server.url}/v1/models/{card['id']}").json() == card
    assert httpx2.get(f"{server.url}/health").json() == {"status": "ok"}


# --- the description ---------------------------------------------------------------------


def test_the_description_lists_every_route(server):
    paths = httpx2.get(f"{server.url}/openapi.json").json()["paths"]
    assert paths.keys() == {*PATHS, "/v1/models/{model}"} - {"/", "/openapi.json"}
    for methods in paths.values():
        (operation,) = methods.values()
        assert operation["description"]
        assert operation["responses"].keys() == {"200", "default"}


EVERYTHING = [
    SamplingParams(
        mode=mode,
        temperature=1.0,
        top_k=1,
        min_tokens=1,
        presence_penalty=1,
        logprobs=20,
        logit_bias=dict.fromkeys(range(32), 1.0),
        bad_words=[[5] * 16] * 16,
        stop_token_ids=range(7, 23),
    )
    for mode in ("paper", "verified", "ar")
]
"""One program for whatever is made up."""


@pytest.fixture(scope="module")
def fuzzed(checkpoint):
    llm = LLM(checkpoint, **SMALL)
    llm.warm_up(EVERYTHING)
    # Hundreds of samples may be asked for at once, so each is short unless it says how long.
    with running_server(llm, defaults=SamplingParams(max_tokens=16)) as server:
        yield server
        server.wait_until_idle()
        assert server.service.engine.restarts == 0


@pytest.fixture(scope="module")
def operations(fuzzed):
    """What the description lists."""
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    found = (result.ok() for result in schema.get_all_operations())
    return {f"{operation.method} {operation.path}": operation for operation in found}


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("/v1/")])
def test_whatever_is_asked_is_answered(operations, path, mode):
    """Much is asked of the routes that decode."""
    (operation,) = (one for name, one in operations.items() if name.endswith(path))
    if not operation.body and mode is not GenerationMode.POSITIVE:
        return

    @settings(max_examples=1000 if operation.body else 100)
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        answer = case.call_and_validate(
            checks=[not_a_server_error, negative_data_rejection], timeout=300
        )
        if path in TYPES:
            check_answer(path, answer, *answer.headers["content-type"])

    ask()
