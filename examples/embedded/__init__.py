"""Makes the included model: its corpus, its folder, and one token for each word of the corpus."""
