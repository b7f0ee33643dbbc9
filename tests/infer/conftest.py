"""A tiny checkpoint for commands that decode, and programs that compile soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
