"""The batch job of `wedlm generate --input`: millions of records, each returned exactly once."""
