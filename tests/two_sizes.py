"""Forwards of two sizes, and small chunks of prompts, so that a program compiles soon."""

from __future__ import annotations

import pytest

from wedlm_jax.decode import sizes
from wedlm_jax.engine.settings import CHUNK_TOKENS


def two_sizes(patch: pytest.MonkeyPatch) -> None:
    """Engines that are made from now on compute 8 tokens at once, or 32."""
    patch.setattr(sizes, "_grid", lambda *_: [8, 32])
    patch.setitem(CHUNK_TOKENS, "cpu", 16)
