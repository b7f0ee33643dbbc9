"""Seeds of several samples of one prompt."""

from __future__ import annotations

import numpy as np


def sample_seed(seed: int, sample: int) -> int:
    """The seed of a prompt's sample, counted from 0: the first has the prompt's own."""
    if sample == 0:
        return seed
    # Neighbouring seeds are other prompts': a sample's must not be one of them.
    return int(np.random.SeedSequence([seed, sample]).generate_state(1)[0])
