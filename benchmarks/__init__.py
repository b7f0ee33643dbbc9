"""Measurements for developers: `python -m benchmarks.NAME --help`. For users: `wedlm bench`."""
