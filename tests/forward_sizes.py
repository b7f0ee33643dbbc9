"""Forwards of few sizes, and small chunks of prompts, so that a program compiles soon."""

from contextlib import contextmanager

import pytest

from wedlm_jax.decode import spans
from wedlm_jax.engine.settings import CHUNK_TOKENS

_USUAL_GRID, _USUAL_CHUNK = spans._grid, CHUNK_TOKENS["cpu"]


def one_size():
    """Engines that this process makes from now on compute 32 tokens at once."""
    spans._grid = lambda *_: [32]
    CHUNK_TOKENS["cpu"] = 16


@contextmanager
def two_sizes():
    """Engines that are compiled in here compute 8 tokens at once, or 32."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_grid", lambda *_: [8, 32])
        yield


@contextmanager
def usual_sizes():
    """Engines that are compiled in here have the sizes that users get."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "_grid", _USUAL_GRID)
        patch.setitem(CHUNK_TOKENS, "cpu", _USUAL_CHUNK)
        yield
