"""Handles the machine that a command runs on, for the library and both jobs: atomic files, buckets,
signals, other processes, the command line, progress, compiled programs on disk."""
