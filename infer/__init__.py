"""Decoding from the command line: prompts, files, the demo and the evaluation."""
