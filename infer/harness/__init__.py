"""Models of wedlm-jax as models of lm-evaluation-harness (`lm_eval`), and tasks for it."""
