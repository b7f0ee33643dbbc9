"""JSONL and Parquet files as records, for both jobs: files found in folders, and their records
read from any place on, in bounded memory."""
