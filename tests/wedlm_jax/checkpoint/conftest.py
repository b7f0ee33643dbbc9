"""Fixtures: the same checkpoint in Hugging Face's format and in orbax's."""

import shutil

import pytest

from tests.examples.checkpoints import write_tiny
from wedlm_jax.checkpoint.convert import convert


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """The folders, in Hugging Face's format and in orbax's; not to be changed."""
    folder = tmp_path_factory.mktemp("pair")
    source = write_tiny(folder / "hf", attention_bias=True)
    convert(source, folder / "orbax")
    return source, folder / "orbax"


@pytest.fixture
def hf(pair, tmp_path):
    return shutil.copytree(pair[0], tmp_path / "模型 é")


@pytest.fixture
def orbax(pair, tmp_path):
    return shutil.copytree(pair[1], tmp_path / "orbax")
