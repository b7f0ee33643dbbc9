"""What a run tells of itself while it trains.

`records` brings the numbers of the steps to the host and averages them over the logging interval,
`log` writes them down. `run_time` says where the time went, `diagnosis` looks into a run that
stands still or is slow.
"""
