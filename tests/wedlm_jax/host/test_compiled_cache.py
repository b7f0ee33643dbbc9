"""Where compiled programs are kept between commands."""

import jax
import pytest

from tests.examples.jax_cache import without_jax_cache
from wedlm_jax.host.compiled_cache import keep_compiled, program_folder


@pytest.fixture(autouse=True)
def _no_cache():
    with without_jax_cache():
        yield


def test_programs_are_kept_where_the_user_s_caches_are(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert program_folder() == tmp_path / "wedlm-jax" / "programs"


def test_nothing_is_kept_twice_or_against_the_user_s_will(tmp_path):
    jax.config.update("jax_enable_compilation_cache", False)
    assert program_folder() is None
    jax.config.update("jax_enable_compilation_cache", True)
    assert program_folder() is not None
    keep_compiled(tmp_path / "first")
    assert program_folder() is None
    keep_compiled(tmp_path / "other")
    kept = jax.config.values["jax_compilation_cache_dir"]
    assert kept == str(tmp_path / "first"), "the first one stays"
