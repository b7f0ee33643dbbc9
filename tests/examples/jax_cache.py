"""JAX without its cache of compiled programs, which the tests share."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache

NAMES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@contextlib.contextmanager
def without_jax_cache():
    """Compiles everything that is compiled inside."""
    before = {name: jax.config.values[name] for name in NAMES}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    jax.clear_caches()
    try:
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
