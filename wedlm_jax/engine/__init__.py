"""Who decodes when: requests, pages, prefixes, bursts of forwards.

`wedlm_jax.engine.engine` is the way in; `scheduler` decides, `device` runs.
"""
