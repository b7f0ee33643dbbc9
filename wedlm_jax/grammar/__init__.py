"""Grammars that completions must follow: the host's part."""
