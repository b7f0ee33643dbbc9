"""Makes the included model: its training corpus, its tokenizer's words, and its folder."""
