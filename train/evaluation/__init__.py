"""Evaluations of a run while it trains: held-out rows, decoded prompts, questions with answers."""
