"""From a request's body to token ids: what reaches the chat template, and when there is room."""

import asyncio
import json

import pytest

from infer.serve import calls
from infer.serve.calls import Calls, Capacity
from infer.serve.errors import ApiError
from infer.serve.fields import ChatRequest
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.wedlm_jax.test_messages import TEMPLATE, TOOLS, USER
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return LLM(folder, window_size=4, max_batch_size=1)


def prompt_of(llm, **fields):
    body = ChatRequest.model_validate({"messages": [USER], "max_tokens": 1, **fields})
    read = Calls(llm, "tiny", SamplingParams(), Capacity(4, 4)).read
    [(token_ids, _)] = asyncio.run(read(body)).prompts
    return llm.codec.decode(token_ids)


def test_tools_and_variables_reach_the_template(llm):
    plain, listed = prompt_of(llm), f"[tools]{json.dumps(TOOLS[0])}"
    assert plain == f"[user]{USER['content']}[assistant]"
    assert prompt_of(llm, tools=TOOLS) == listed + plain
    assert prompt_of(llm, tools=TOOLS, tool_choice="auto") == listed + plain
    assert prompt_of(llm, tools=TOOLS, tool_choice="none") == plain
    assert prompt_of(llm, tools=[]) == plain
    assert prompt_of(llm, chat_template_kwargs={"enable_thinking": False}) == plain + "()"


def test_retry_after_follows_how_soon_others_were_done(monkeypatch):
    now = 0.0
    monkeypatch.setattr(calls.time, "monotonic", lambda: now)
    places = Capacity(running=4, queued=4)
    places.enter(8)
    for _ in range(4):
        now += 10
        places.leave(1)
        places.enter(1)
    now += 10
    with pytest.raises(ApiError) as full:
        places.enter(3)
    # Four in 40 seconds: three more take 30.
    assert full.value.headers["Retry-After"] == "30"
    with pytest.raises(ApiError) as full:
        places.enter(8)
    assert full.value.headers["Retry-After"] == "60"
