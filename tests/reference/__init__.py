"""Slow, obvious NumPy versions of what the library compiles, written for reading.

Random numbers are jax.random's, so that both draw the same.
"""
