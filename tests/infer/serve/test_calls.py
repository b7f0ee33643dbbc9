"""From a request's body to token ids: what reaches the chat template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from infer.serve.calls import Calls, Capacity
from infer.serve.errors import ApiError
from infer.serve.fields import ChatRequest
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.wedlm_jax.test_messages import CALL, TEMPLATE, TOOLS, USER
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return LLM(folder, window_size=4, max_batch_size=1)


def prompt_of(llm: LLM, **fields: Any) -> str:
    calls = Calls(llm, "tiny", SamplingParams(), Capacity(4, 4))
    body = ChatRequest.model_validate({"messages": [USER], "max_tokens": 1, **fields})
    [(token_ids, _)] = asyncio.run(calls.read(body)).prompts
    assert llm.codec is not None
    return llm.codec.decode(token_ids)


def test_tools_and_variables_reach_the_template(llm: LLM) -> None:
    plain, listed = prompt_of(llm), f"[tools]{json.dumps(TOOLS[0])}"
    assert plain == f"[user]{USER['content']}[assistant]"
    assert prompt_of(llm, tools=TOOLS) == listed + plain
    assert prompt_of(llm, tools=TOOLS, tool_choice="auto") == listed + plain
    assert prompt_of(llm, tools=TOOLS, tool_choice="none") == plain
    assert prompt_of(llm, tools=[]) == plain
    assert prompt_of(llm, chat_template_kwargs={"enable_thinking": False}) == plain + "()"


def test_calls_and_their_results_come_back(llm: LLM) -> None:
    turns = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": "9"},
    ]
    assert prompt_of(llm, messages=turns) == (
        f"[user]{USER['content']}[assistant]weather city=Oslo days=2[tool]9[assistant]"
    )


def test_a_call_that_cannot_be_read_is_named(llm: LLM) -> None:
    broken = {**CALL, "function": {"name": "weather", "arguments": "{"}}
    with pytest.raises(ApiError, match="expected arguments that are a JSON object") as refused:
        prompt_of(llm, messages=[USER, {"role": "assistant", "tool_calls": [broken]}])
    assert (refused.value.status, refused.value.param) == (400, "messages.1.tool_calls.0")
