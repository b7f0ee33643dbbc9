"""Where compiled programs are kept between commands."""

from __future__ import annotations

from pathlib import Path

import jax
import pytest

from wedlm_jax.host.compiled_cache import keep_compiled


def test_compiled_programs_are_kept_where_the_user_s_caches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = jax.config.values["jax_compilation_cache_dir"]
    seconds = jax.config.values["jax_persistent_cache_min_compile_time_secs"]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled()
        kept = jax.config.values["jax_compilation_cache_dir"]
        assert kept == str(tmp_path / "wedlm-jax" / "compiled")
        keep_compiled(tmp_path / "other")
        assert jax.config.values["jax_compilation_cache_dir"] == kept, "the first one stays"
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", seconds)
