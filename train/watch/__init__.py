"""What a run tells of itself while it trains.

`pending` brings the numbers of the steps to the host, `records` averages them over the logging
interval, `log` and `boards` write them down. `run_time` says where the time went, `stall` and
`profile` look into a run that is slow or stands still, `norms` measures parameters and updates.
"""
