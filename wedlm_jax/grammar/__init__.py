"""Grammars that a completion must follow, as the host knows them."""
