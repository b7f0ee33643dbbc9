"""How long the streams of a recipe's rows are."""

from __future__ import annotations

from train.recipe.config import TrainConfig


def prediction_length(config: TrainConfig) -> int:
    """Returns the tokens of a row's prediction stream; 0 where there is none."""
    if config.objective != "wedlm":
        return 0
    return config.prediction_blocks * config.block_size or config.row_length


def leaves_blocks_out(config: TrainConfig) -> bool:
    """Tells whether a row's prediction stream is shorter than the row."""
    return 0 < prediction_length(config) < config.row_length


def row_tokens(config: TrainConfig) -> int:
    """Returns the tokens that go through the layers for a row: of both streams."""
    return config.row_length + prediction_length(config)
