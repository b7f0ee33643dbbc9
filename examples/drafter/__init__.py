"""A drafter for SmolLM2-135M-Instruct: prompts, the model's own answers, and the run."""
