"""A machine without libtpu, the library that compiles for TPUs."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

NO_LIBTPU = 'compiling for TPUs needs libtpu, which is not installed: pip install "wedlm-jax[tpu]"'


def hide_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it were not installed; everything else is found as before."""
    find = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "libtpu" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
