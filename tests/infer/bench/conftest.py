"""Programs that compile soon, and the figures of a comparison."""

import json

import jax
import pytest

import wedlm_jax.engine.settings
from infer.bench.command import main


@pytest.fixture(autouse=True)
def few_sizes(monkeypatch):
    """Small chunks of prompts: forwards of fewer sizes, which compile several times faster."""
    monkeypatch.setitem(wedlm_jax.engine.settings.CHUNK_TOKENS, "cpu", 16)


def measured(command, folder, arguments):
    output = folder / "figures.json"
    assert command([*arguments.split(), "--output", str(output)]) == 0
    figures = json.loads(output.read_text(encoding="utf-8"))
    assert figures.pop("machine")["jax"] == jax.__version__
    return figures


def compared(what, folder, arguments):
    return measured(main, folder, f"--compare {what} {arguments}")[what]
