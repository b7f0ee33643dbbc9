"""Milliseconds of a dual-stream step on conversations, with their prompts in the prediction stream
and without.

The step is that of `train.bench.step`. All ways have the same weights, rows and masks, and must
find the same loss and gradients before anything is timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.bench.step import BLOCK_SIZE, SHAPE, JaxStep, Step, StepCost, timed_by_turns
from train.step_cost import forward_flops
from wedlm_jax.benchmark import Bar
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer
from wedlm_jax.packing import TokenisedSample, prediction_blocks, row_arrays

SAMPLES = 4
"""Conversations in a row, of one length."""


def compare_prompts(
    lengths: Sequence[int],
    *,
    rows: int,
    share: float,
    backends: Sequence[str],
    unroll: int,
    passes: int,
    bar: Bar,
    model: ModelConfig = SHAPE,
) -> Iterator[list[StepCost]]:
    """Measures one row length after another.

    Args:
      rows: packed rows of the micro-batch.
      share: of a conversation's blocks that are its prompt.
      backends: of attention.
      unroll: layers in one turn of the scan.

    Raises:
      wedlm_jax.train.bench.step.StepsDiffer: before anything of that length is timed.
    """
    transformer = Transformer(model, rngs=nnx.Rngs(0))
    for length in lengths:
        whole, few = conversations(model, rows, length, share)
        assert few.prediction_blocks is not None
        ways = {"all blocks": whole, "prompts left out": few}
        steps: dict[str, Step] = {
            f"{backend}, {way}": JaxStep(
                transformer, packed, LossConfig(attention=backend, unroll=unroll)
            )
            for backend in backends
            for way, packed in ways.items()
        }
        shorter = few.prediction_blocks.shape[1] * BLOCK_SIZE
        flops = [3 * forward_flops(model, rows, length, n) for n in (length, shorter)]
        yield timed_by_turns(steps, flops * len(backends), length, rows, passes, bar)


def conversations(
    model: ModelConfig, rows: int, length: int, share: float
) -> tuple[PackedRows, PackedRows]:
    """Makes rows of `SAMPLES` conversations of random tokens, once with all blocks in the
    prediction stream, and once without those of prompts."""
    blocks = length // BLOCK_SIZE // SAMPLES
    answer = max(blocks - round(share * blocks), 1)
    random = np.random.default_rng(0)
    made = []
    for _ in range(rows):
        samples = [
            TokenisedSample(
                random.integers(0, model.vocab_size, blocks * BLOCK_SIZE).astype(np.int32),
                np.repeat(np.arange(blocks) >= blocks - answer, BLOCK_SIZE),
            )
            for _ in range(SAMPLES)
        ]
        made.append(row_arrays(samples, row_length=length, block_size=BLOCK_SIZE, pad_token_id=0))
    arrays = {name: jnp.asarray(np.stack([row[name] for row in made])) for name in made[0]}
    places = [prediction_blocks(row["trainable"], BLOCK_SIZE, answer * SAMPLES) for row in made]
    whole = PackedRows(**arrays)
    return whole, dataclasses.replace(whole, prediction_blocks=jnp.asarray(np.stack(places)))
