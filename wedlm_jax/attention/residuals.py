"""The name of attention's residuals, for policies of `jax.checkpoint`."""

ATTENDED = "attended"
"""The output and, in the tiled backends, the log of each row's sum of exponentials."""
