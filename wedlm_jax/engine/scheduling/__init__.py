"""Plans bursts on the host: which sequences enter, where, on which pages, and for how many
forwards. Start with `wedlm_jax.engine.scheduling.scheduler`."""
