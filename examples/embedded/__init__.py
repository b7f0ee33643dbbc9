"""The included model: the corpus that it is trained on, and how its folder is made."""
