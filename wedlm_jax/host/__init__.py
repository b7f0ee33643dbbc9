"""Deals with the machine that a command runs on, for the library and both jobs: files that appear
whole, buckets, signals, other processes, the command line, progress, compiled programs on disk."""
