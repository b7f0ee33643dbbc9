"""What a run is trained on: rows packed once, then read in an order that the seed decides.

`synthetic` makes rows from the seeded corpus, `wedlm tokenize` (`command`, `job`) from files;
`order` and `batches` read both alike.
"""
