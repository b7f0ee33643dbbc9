"""`wedlm bench`: decoding speed against AR, against matrix products alone, against others."""
