"""A tiny checkpoint, and programs that compile soon."""

import pytest

import wedlm_jax.engine.settings
from tests.examples.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """Small chunks of prompts: forwards of fewer sizes, which compile several times faster."""
    monkeypatch.setitem(wedlm_jax.engine.settings.CHUNK_TOKENS, "cpu", 16)
