"""Requests made up from the server's own description: no answer is a 500, and every answer is what
the description says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.infer.serve.conftest import SMALL
from tests.infer.serve.running_server import RunningServer, running_server
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

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
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    llm = LLM(write_tiny_checkpoint(tmp_path_factory.mktemp("model")), **SMALL)
    llm.warm_up(EVERYTHING)
    with running_server(llm) as server:
        yield server
        server.wait_until_idle()
        assert server.service.engine.restarts == 0


@pytest.fixture(scope="module")
def operations(fuzzed: RunningServer) -> dict[str, Any]:
    """What the description lists."""
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    found = (result.ok() for result in schema.get_all_operations())
    return {f"{operation.method} {operation.path}": operation for operation in found}


@pytest.mark.full
def test_the_description_lists_every_route(operations: dict[str, Any]) -> None:
    assert {name.rpartition(" ")[2] for name in operations} == {
        *(path for path in PATHS if path not in ("/", "/openapi.json")),
        "/v1/models/{model}",
    }


def fuzz(operation: Any, mode: GenerationMode, data: st.DataObject) -> None:
    case = data.draw(operation.as_strategy(generation_mode=mode))
    case.call_and_validate(checks=CHECKS, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", [path for path in PATHS if path.startswith("/v1/")])
@given(data=st.data())
def test_whatever_is_asked_is_answered_as_described(
    operations: dict[str, Any], path: str, mode: GenerationMode, data: st.DataObject
) -> None:
    for name, operation in operations.items():
        if name.endswith(path) and (operation.body or mode is GenerationMode.POSITIVE):
            fuzz(operation, mode, data)


@pytest.mark.full
@pytest.mark.parametrize("mode", GenerationMode)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(data=st.data())
@settings(max_examples=1000)
def test_much_is_asked(
    operations: dict[str, Any], path: str, mode: GenerationMode, data: st.DataObject
) -> None:
    fuzz(operations[f"post {path}"], mode, data)
