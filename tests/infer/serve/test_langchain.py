"""LangChain's client of OpenAI's API, where it is installed."""

from __future__ import annotations

import pytest

from tests.infer.serve.running_server import MODEL, RunningServer
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

QUESTION = "Count from 3 to 30 in steps of 3."


@pytest.mark.full
def test_a_chain_asks_and_streams(server: RunningServer, offline: LLM) -> None:
    langchain = pytest.importorskip("langchain_openai")
    (expected,) = offline.chat(
        [{"role": "user", "content": QUESTION}], SamplingParams(max_tokens=99)
    )
    chat = langchain.ChatOpenAI(
        base_url=f"{server.url}/v1", api_key="unused", model=MODEL, max_retries=0, temperature=0
    )
    said = chat.invoke(QUESTION)
    assert said.content == expected.text
    assert said.usage_metadata["output_tokens"] == len(expected.token_ids)
    assert "".join(piece.content for piece in chat.stream(QUESTION)) == expected.text
    history = [("human", QUESTION), said, ("human", "Again.")]
    assert chat.invoke(history, max_tokens=1).usage_metadata["output_tokens"] == 1
