"""The embedded model behind the API, once for all tests, and what it says without one."""

import pytest
from openai import OpenAI

from tests.infer.serve.running_server import running_server
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams

SMALL = {"window_size": 8, "max_batch_size": 4, "deterministic": True}
"""One size of forwards: little is compiled."""

KINDS = [
    SamplingParams(),
    SamplingParams(mode="paper", temperature=0.7, top_p=0.9, logprobs=4, min_tokens=1),
    SamplingParams(mode="ar", temperature=0.7),
    SamplingParams(regex="a"),
]
"""Whatever the tests ask for, so that one program serves them all."""


@pytest.fixture(scope="session")
def offline():
    """The model without a server."""
    llm = LLM(**SMALL)
    llm.warm_up(KINDS)
    return llm


@pytest.fixture(scope="session")
def server():
    llm = LLM(**SMALL)
    llm.warm_up(KINDS)
    # Short bursts: even short answers come in pieces.
    with running_server(llm, max_waiting=32, burst_seconds=1e-3) as server:
        yield server


@pytest.fixture
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as client:
        yield client
    server.wait_until_idle()
