"""Slow, obvious NumPy versions of what the library compiles, written for reading."""
