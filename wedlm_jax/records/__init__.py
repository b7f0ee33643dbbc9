"""Reads JSONL and Parquet files as records, for both jobs: finds files in folders, and reads their
records from any position in bounded memory."""
