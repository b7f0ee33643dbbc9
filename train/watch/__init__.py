"""Monitors a run while it trains.

`records` brings the metrics of the steps to the host and averages them over the logging interval,
`log` writes them. `run_time` reports where the time went, `diagnosis` helps with a run that is slow
or stuck.
"""
