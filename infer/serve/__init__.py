"""`wedlm serve`: the OpenAI API over the engine."""
