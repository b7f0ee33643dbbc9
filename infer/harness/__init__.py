"""wedlm-jax models for lm-evaluation-harness (`lm_eval`), and tasks for it."""
