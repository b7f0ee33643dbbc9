"""Chooses the window of each sequence: as requested, or by speed."""
