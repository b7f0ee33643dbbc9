"""Compiles for absent hardware, and analyses the compiled programs."""
