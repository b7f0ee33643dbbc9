"""A tiny checkpoint for commands that decode, and programs that compile soon."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_checkpoint import write_tiny_checkpoint
from tests.two_sizes import two_sizes


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", autouse=True)
def _two_sizes() -> Iterator[None]:
    """Forwards of two sizes instead of a dozen: the tests of the engine have them all."""
    with pytest.MonkeyPatch.context() as patch:
        two_sizes(patch)
        yield
