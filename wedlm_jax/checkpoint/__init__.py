"""Weights in and out: Hugging Face folders, orbax, runs."""
