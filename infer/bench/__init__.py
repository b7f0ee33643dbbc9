"""`wedlm bench`: what decoding costs, against AR, against its own products, against others."""
