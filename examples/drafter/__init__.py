"""Prompts whose answers a drafter is trained on."""
