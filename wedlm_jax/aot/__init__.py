"""Compiling for machines that are not here, and reading what the compiler says."""
