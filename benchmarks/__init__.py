"""Measurements for those who work on this project: `python -m benchmarks.NAME --help`. What users
measure is `wedlm bench`."""
