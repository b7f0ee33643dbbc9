"""Checkpoints, runs, data and options that tests share."""
