"""The decode engine: requests, pages, cached prefixes, bursts of forwards.

Start with `wedlm_jax.engine.engine`; `scheduler` decides what runs, and `device` runs it.
"""
