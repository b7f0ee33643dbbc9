"""Decides on the host what the next burst decodes: which sequences enter, where, on which pages,
and for how many forwards. Start with `wedlm_jax.engine.scheduling.scheduler`."""
