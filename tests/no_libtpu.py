"""A machine without libtpu, the library that compiles for TPUs."""

import importlib.util

NO_LIBTPU = 'compiling for TPUs needs libtpu, which is not installed: pip install "wedlm-jax[tpu]"'


def hide_libtpu(monkeypatch):
    """As if it were not installed; everything else is found as before."""
    find = importlib.util.find_spec

    def without(name, package=None):
        return None if name == "libtpu" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
