"""The name of what attention keeps for its backward pass, for policies of `jax.checkpoint`."""

ATTENDED = "attended"
"""The output and, of the tiled backends, the log of each row's sum of exponentials."""
