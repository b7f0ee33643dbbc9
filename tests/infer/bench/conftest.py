"""Programs that compile soon."""

import pytest

import wedlm_jax.engine.settings


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """Small chunks of prompts: forwards of fewer sizes, which compile several times faster."""
    monkeypatch.setitem(wedlm_jax.engine.settings.CHUNK_TOKENS, "cpu", 16)
