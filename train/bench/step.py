"""Milliseconds of a dual-stream step against the same step in PyTorch.

Forward and backward pass of one micro-batch, float32, nothing recomputed in the backward pass.
Left out on both sides: drawing masks and building the batch, clipping, and the optimizer's update.
Both are given the same weights, the same batch and the same mask, and must find the same loss
and gradients before anything is timed.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.bench.rival import TorchStep, step_inputs
from train.step import LossFn, Objective, accumulate, prepare
from train.step_cost import forward_flops
from wedlm_jax.benchmark import Bar, by_turns, num_cores
from wedlm_jax.checkpoint.names import arrays_from_model, hf_path
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import DualStreamBatch, PackedRows
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer

SHAPE = ModelConfig(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    qk_norm=True,
    tie_word_embeddings=True,
    max_position_embeddings=32_768,
    mask_token_id=4095,
)
"""What is trained: 28M parameters in the shape of Qwen3, with a small vocabulary."""
BLOCK_SIZE = 32
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3
"""Between both, relative: of the loss, and of each parameter's gradient in the norm of its
difference."""


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Holds what a forward and backward pass took, done one way.

    Attributes:
      way: a backend of attention here, or PyTorch.
      length, rows: L of a packed row, and how many there are.
      milliseconds: pass by pass.
      flops: of the step by its sizes, visible pairs of attention only.
      loss: what it found.
    """

    way: str
    length: int
    rows: int
    milliseconds: list[float]
    flops: float
    loss: float

    @property
    def median(self) -> float:
        return statistics.median(self.milliseconds)


class StepsDiffer(Exception):
    """Says that two ways to compute a step do not find the same."""


def compare_step(
    lengths: Sequence[int],
    *,
    rows: int,
    backends: Sequence[str],
    rivals: Sequence[str],
    unroll: int,
    passes: int,
    bar: Bar,
    model: ModelConfig = SHAPE,
) -> Iterator[list[StepCost]]:
    """Measures one row length after another.

    Args:
      rows: packed rows of the micro-batch.
      backends: of attention, here.
      rivals: "torch", "torch-compiled", both or none.
      unroll: layers in one turn of the scan.
      model: the shape.

    Raises:
      StepsDiffer: before anything of that length is timed.
      InputError: `torch.compile` does not work here.
    """
    transformer = Transformer(model, rngs=nnx.Rngs(0))
    for length in lengths:
        packed = random_rows(model, rows, length)
        steps = steps_of(transformer, packed, backends, rivals, unroll=unroll)
        flops = [3 * forward_flops(model, rows, length)] * len(steps)
        yield timed_by_turns(steps, flops, length, rows, passes, bar)


def timed_by_turns(
    steps: Mapping[str, Step], flops: Sequence[float], length: int, rows: int, passes: int, bar: Bar
) -> list[StepCost]:
    """Runs each step once, compares what they find, and measures them.

    Args:
      flops: of each.

    Raises:
      StepsDiffer: before anything is timed.
    """
    bar.expect(len(steps))
    for name, step in steps.items():
        bar.begin(f"L = {length:,} · {name}, compiling")
        step.run()
    check_agreement(steps)
    runs = {name: partial(_timed, step) for name, step in steps.items()}
    made = by_turns(runs, passes, bar, f"L = {length:,}")
    return [
        StepCost(name, length, rows, [each[0] for each in some[1:]], count, some[-1][1])
        for (name, some), count in zip(made.items(), flops, strict=True)
    ]


class Step(Protocol):
    """Runs forward and backward pass of a batch, compiled or ready to be."""

    def run(self) -> float:
        """Computes loss and gradients; returns the loss once both are there."""

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradients of the last run, by the dotted paths of the parameters."""


class JaxStep:
    """Runs the step of `train.step`.

    Args:
      model: whose weights.
      rows: packed rows ``[R, L]``.
      loss: how it is computed.
    """

    def __init__(self, model: Transformer, rows: PackedRows, loss: LossConfig):
        graph, self._parameters = nnx.split(model)
        self._batches, self._denominators, share = _prepared(model.config, rows, loss)
        self._compute = jax.jit(
            lambda parameters, batches, totals: accumulate(
                graph, parameters, batches, totals, share
            )
        )
        self._found: Any = None

    def run(self) -> float:
        found = self._compute(self._parameters, self._batches, self._denominators)
        self._found = jax.block_until_ready(found)
        return float(self._found[1]["loss"])

    def gradients(self) -> dict[str, np.ndarray]:
        leaves = jax.tree_util.tree_leaves_with_path(self._found[0])
        return {hf_path(path): np.asarray(leaf) for path, leaf in leaves}


def steps_of(
    model: Transformer,
    rows: PackedRows,
    backends: Sequence[str],
    rivals: Sequence[str],
    *,
    unroll: int,
) -> dict[str, Step]:
    """Returns the step by every backend here and by every rival, by name."""
    steps: dict[str, Step] = {
        f"jax, {name}": JaxStep(model, rows, LossConfig(attention=name, unroll=unroll))
        for name in backends
    }
    if rivals:
        loss = LossConfig()
        batches, denominators, _ = _prepared(model.config, rows, loss)
        batch = jax.tree.map(lambda x: x[0], batches)
        inputs = step_inputs(model.config, batch, denominators, loss)
        values = {name: np.asarray(value) for name, value in arrays_from_model(model).items()}
    for rival in rivals:
        steps[rival] = TorchStep(
            model.config,
            values,
            inputs,
            compiled=rival == "torch-compiled",
            threads=num_cores(),
        )
    return steps


def _prepared(
    model: ModelConfig, rows: PackedRows, loss: LossConfig
) -> tuple[DualStreamBatch, dict[str, jax.Array], LossFn]:
    """Returns the same batch each time, ``[1, R, ...]``: one micro-batch."""
    objective = Objective("wedlm", BLOCK_SIZE, model.require_mask_token_id(), loss)
    one = jax.tree.map(lambda x: x[None], rows)
    batches, denominators, share = prepare(objective, one, jax.random.key(1))
    assert isinstance(batches, DualStreamBatch)
    return batches, denominators, share


def random_rows(model: ModelConfig, rows: int, length: int) -> PackedRows:
    """Returns rows of one sample each, of random tokens, every one trainable."""
    tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, model.vocab_size)
    return PackedRows(
        tokens=tokens.astype(jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)),
        segment_ids=jnp.ones((rows, length), jnp.int32),
        trainable=jnp.ones((rows, length), bool),
    )


def check_agreement(steps: Mapping[str, Step]) -> None:
    """Compares losses and gradients with those of the first.

    Raises:
      StepsDiffer: naming what is not the same.
    """
    names = list(steps)
    expected_loss, expected = steps[names[0]].run(), steps[names[0]].gradients()
    for name in names[1:]:
        loss = steps[name].run()
        if not abs(loss / expected_loss - 1) < LOSS_TOLERANCE:
            raise StepsDiffer(
                f"the loss is {loss:.7g} by {name}, {expected_loss:.7g} by {names[0]}"
            )
        for path, gradient in steps[name].gradients().items():
            error = np.linalg.norm(gradient - expected[path]) / np.linalg.norm(expected[path])
            if not error < GRADIENT_TOLERANCE:
                raise StepsDiffer(
                    f"the gradient of {path} by {name} is {error:.2g} away from that by {names[0]}"
                )


def _timed(step: Step) -> tuple[float, float]:
    """Measures a step in milliseconds; returns its loss, too."""
    started = time.perf_counter()
    loss = step.run()
    return (time.perf_counter() - started) * 1e3, loss
