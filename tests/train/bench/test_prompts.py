"""The bench of steps with and without prompts in the prediction stream."""

from __future__ import annotations

import numpy as np
import pytest

from tests.examples.training import TINY
from train.bench.prompts import SAMPLES, compare_prompts, conversations
from train.bench.step import BLOCK_SIZE
from wedlm_jax.benchmark import Bar

LENGTH = SAMPLES * 2 * BLOCK_SIZE


def test_half_of_the_rows_blocks_are_left_out() -> None:
    whole, few = conversations(TINY, rows=2, length=LENGTH, share=0.5)
    assert whole.prediction_blocks is None
    assert np.asarray(few.prediction_blocks).tolist() == [[1, 3, 5, 7]] * 2
    assert np.asarray(few.trainable).sum() == LENGTH
    np.testing.assert_array_equal(few.tokens, whole.tokens)


@pytest.mark.full
def test_both_ways_agree_and_are_measured() -> None:
    [costs] = compare_prompts(
        [LENGTH],
        rows=1,
        share=0.5,
        backends=["streams"],
        unroll=1,
        passes=2,
        bar=Bar(),
        model=TINY,
    )
    whole, few = costs
    assert (whole.way, few.way) == ("streams, all blocks", "streams, prompts left out")
    assert whole.loss == pytest.approx(few.loss, rel=1e-5)
    assert min(map(len, (whole.milliseconds, few.milliseconds))) == 2
    assert few.flops < whole.flops
