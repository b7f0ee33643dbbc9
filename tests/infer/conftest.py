"""A tiny checkpoint for commands that decode, and programs that compile soon."""

import json
import shutil

import pytest

from tests.examples.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def stock(checkpoint, tmp_path_factory):
    """The same weights as a model that was not trained on masks."""
    folder = shutil.copytree(checkpoint, tmp_path_factory.mktemp("stock") / "qwen3")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "qwen3"}))
    return folder
