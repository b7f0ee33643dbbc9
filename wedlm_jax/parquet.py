"""Parquet, whose reader is an optional dependency."""

from __future__ import annotations

from typing import Any

from wedlm_jax.errors import InputError


def require_pyarrow() -> Any:
    """The module `pyarrow.parquet`.

    Raises:
      InputError: it is not installed.
    """
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            "Parquet files need pyarrow, which is not installed: pip install 'wedlm-jax[data]'"
        ) from None
    return pyarrow.parquet
