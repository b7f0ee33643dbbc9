"""Answers have the shapes of OpenAI's API. Tokens that are parts of characters have true bytes and
a name of their own. To requests made up from the server's own description no answer is a 500, and
every answer is what the description says."""

import pytest
import schemathesis
from hypothesis import given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

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


# --- the description ---------------------------------------------------------------------


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
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
    with running_server(llm) as server:
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
def test_the_description_lists_every_route(operations):
    assert {name.rpartition(" ")[2] for name in operations} == {
        *(path for path in PATHS if path not in ("/", "/openapi.json")),
        "/v1/models/{model}",
    }


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("/v1/")])
def test_whatever_is_asked_is_answered_as_described(operations, path, mode):
    """Much is asked of the routes that decode."""
    (operation,) = (one for name, one in operations.items() if name.endswith(path))
    if not operation.body and mode is not GenerationMode.POSITIVE:
        return

    @settings(max_examples=1000 if operation.body else 100)
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case):
        case.call_and_validate(checks=CHECKS, timeout=60)

    ask()
