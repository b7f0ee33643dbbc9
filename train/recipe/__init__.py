"""The recipe of a run: its fields, what may be given for them, and how they change by phases."""
