"""What a forward does: spans, predictions, what is filled and what is committed."""
