"""The decode engine: requests, pages, cached prefixes, bursts of forwards.

Start with `wedlm_jax.engine.engine`; `scheduling` decides what runs, and `device` runs it.
"""
