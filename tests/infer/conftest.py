"""Tiny checkpoints for commands that decode, and models that are loaded and compiled once."""

import shutil

import pytest

import infer.chat.command
import infer.evaluate
import infer.generate
import infer.harness.command
import wedlm_jax.checkpoint.open
from infer.flags import LLM_OPTIONS
from tests.examples.checkpoints import edit_json
from tests.examples.decode import EVERYTHING
from tests.examples.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def stock(checkpoint, tmp_path_factory):
    """The same weights as a model that was not trained on masks."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("stock") / "qwen3")
    edit_json(folder / "config.json", model_type="qwen3")
    return folder


@pytest.fixture(scope="session")
def without_tokenizer(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("none") / "bare", tokenizer=False)


@pytest.fixture(scope="session")
def load_once():
    """Loads as commands do, but a model that was loaded with the same options serves again, with
    one program for whatever the tests ask for: compiling is what takes the time."""
    load, loaded = infer.generate.load, {}

    def cached(options):
        embedded = wedlm_jax.checkpoint.open.EMBEDDED_MODEL  # which tests may replace
        key = repr([embedded, *(options.get(name) for name in LLM_OPTIONS)])
        if key not in loaded:
            loaded[key] = load({**options, "warmup": False})
            loaded[key].engine.expect(EVERYTHING)
        return loaded[key]

    return cached


@pytest.fixture(autouse=True)
def _load_once(load_once, monkeypatch):
    for command in (infer.generate, infer.evaluate, infer.chat.command, infer.harness.command):
        monkeypatch.setattr(command, "load", load_once)


@pytest.fixture(scope="session")
def llm(checkpoint, load_once):
    """Returns the tiny model, loaded with the options that the tests give to commands."""
    return load_once({"model": str(checkpoint), "window_size": 4, "batch_size": 4})
