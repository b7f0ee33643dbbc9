"""The batch job of `wedlm generate --input`: millions of rows, each back exactly once."""
