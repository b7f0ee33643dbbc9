"""Who decodes when: requests, pages, prefixes, bursts of forwards.

Until it is removed, the engine with rectangular batches goes by this package's name too.
"""

from wedlm_jax.old_engine import AUTO_WINDOWS, DEFAULT_WINDOW, Engine

__all__ = ["AUTO_WINDOWS", "DEFAULT_WINDOW", "Engine"]
