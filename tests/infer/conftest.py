"""A tiny checkpoint for commands that decode, and programs that compile soon."""

import pytest

from tests.examples.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
