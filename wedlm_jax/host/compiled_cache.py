"""Compiled programs kept on disk, so that the same command starts faster the next time."""

from __future__ import annotations

import os
from pathlib import Path

from wedlm_jax.host.storage import absolute


def keep_compiled(folder: Path | None = None) -> None:
    """Keeps compiled programs in ``folder``, unless JAX has been given another: the same command
    starts faster the next time.

    Args:
      folder: by default ``wedlm-jax/compiled`` in the user's cache folder.
    """
    import jax

    if jax.config.jax_compilation_cache_dir is not None:  # type: ignore[attr-defined]
        return
    if folder is None:
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(cache) / "wedlm-jax" / "compiled"
    jax.config.update("jax_compilation_cache_dir", str(absolute(folder)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
