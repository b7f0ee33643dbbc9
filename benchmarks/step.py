"""Measures a dual-stream training step, in milliseconds, against the same step in PyTorch; or, on
conversations, with and without their prompts in the prediction stream.

Forward and backward pass of one micro-batch (D = 512, 8 layers), float32, nothing recomputed in the
backward pass. Left out on both sides: drawing masks and building the batch, clipping, and the
optimizer's update. All get the same weights, rows and masks, and must compute the same loss and
gradients before anything is timed.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.options import add_numbers, new_parser
from benchmarks.torch_step import TorchStep
from infer.bench.measure import Report, by_turns, table
from train.recipe.config import TrainConfig
from train.step import LossFn, Objective, accumulate, prepare
from train.step_cost import model_flops
from wedlm_jax.attention import IMPLEMENTATIONS
from wedlm_jax.checkpoint.names import arrays_from_model, dotted_path
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import DualStreamBatch, PackedRows
from wedlm_jax.errors import InputError, require_extra
from wedlm_jax.host.command_line import run_command
from wedlm_jax.loss import LossConfig
from wedlm_jax.model import Transformer
from wedlm_jax.packing import TokenisedSample, prediction_blocks, row_arrays

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
"""The trained model: 28M parameters in the shape of Qwen3, with a small vocabulary."""
BLOCK_SIZE = 32
SAMPLES = 4
"""Conversations per row, all of one length."""
RIVALS = ("torch", "torch-compiled")
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-3
"""Relative differences allowed between two steps: in the loss, and in the norm of each parameter's
gradient difference."""


class StepsDiffer(Exception):
    """Reports that two ways to compute a step disagree."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("step", __doc__)
    add = parser.add_argument
    add_numbers(parser, "--lengths", [512, 1024], "L of packed rows")
    add_numbers(parser, "--rows", 1, "packed rows of the micro-batch")
    add_numbers(parser, "--unroll", SHAPE.num_hidden_layers, "layers per iteration of the scan")
    add(
        "--attention",
        nargs="+",
        choices=tuple(IMPLEMENTATIONS),
        default=["streams", "blockwise"],
        help="backends, one or more [streams blockwise]",
    )
    add(
        "--rival",
        nargs="*",
        choices=RIVALS,
        help="PyTorch as it is and with torch.compile; no value: ours alone [both; none with "
        "--prompt-share]",
    )
    add(
        "--prompt-share",
        type=float,
        default=None,
        metavar="X",
        help="time rows of conversations in which this share of blocks is prompt, with and without "
        "those blocks in the prediction stream",
    )
    options = parser.parse_args(arguments)
    if wrong := [length for length in options.lengths if length % BLOCK_SIZE]:
        raise InputError(f"--lengths: expected multiples of {BLOCK_SIZE}, not {wrong[0]}")
    share = options.prompt_share
    if share is not None and not 0 < share < 1:
        raise InputError("--prompt-share: expected a number between 0 and 1")
    rivals = getattr(options, "rival", RIVALS if share is None else ())
    if rivals:
        require_extra("a step in PyTorch", "rival", "torch")
    report, transformer = Report(options.output), Transformer(SHAPE, rngs=nnx.Rngs(0))
    for length in options.lengths:
        if share is None:
            packed = {"jax": random_rows(SHAPE, options.rows, length)}
        else:
            packed = conversations(SHAPE, options.rows, length, share)
        steps = steps_of(transformer, packed, options.attention, rivals, unroll=options.unroll)
        try:
            rows = timed_by_turns(steps, options.passes, f"L = {length:,}")
        except StepsDiffer as differ:
            print(f"{parser.prog}: {differ}; nothing was timed", file=sys.stderr)
            return 1
        title = f"forward and backward, {options.rows} × {length:,} tokens"
        report.add("step", [{"length": length, **row} for row in rows], table(title, rows))
    return 0


def timed_by_turns(steps: Mapping[str, Step], passes: int, title: str) -> list[dict[str, Any]]:
    """Runs each step once, compares their results (`check_agreement`), and measures them; returns a
    row for each."""
    for step in steps.values():
        step.run()
    check_agreement(steps)
    made = by_turns({name: partial(_timed, step) for name, step in steps.items()}, passes, title)
    rows: list[dict[str, Any]] = []
    for name, results in made.items():
        times, gflop = [ms for ms, _ in results[1:]], steps[name].flops / 1e9
        median = statistics.median(times)
        rows.append(
            {
                "way": name,
                "ms": times,
                "×": median / statistics.median(rows[0]["ms"]) if rows else 1.0,
                "GFLOP": gflop,
                "GFLOP/s": gflop / median * 1e3,
                "loss": f"{results[-1][1]:.6f}",
            }
        )
    return rows


class Step(Protocol):
    """Runs forward and backward pass of a batch, compiled or ready to be.

    Attributes:
      flops: operations in its products, by its sizes; in attention, of visible pairs only.
    """

    flops: float

    def run(self) -> float:
        """Computes loss and gradients; returns the loss once both are ready."""

    def gradients(self) -> dict[str, np.ndarray]:
        """Returns the gradients of the last run, by the dotted paths of the parameters."""


class JaxStep:
    """Runs the step of `train.step` on packed rows ``[R, L]``."""

    def __init__(self, model: Transformer, rows: PackedRows, loss: LossConfig):
        self.flops = _flops(model.config, rows)
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
        return {dotted_path(path): np.asarray(leaf) for path, leaf in leaves}


def steps_of(
    model: Transformer,
    packed: Mapping[str, PackedRows],
    backends: Sequence[str],
    rivals: Sequence[str],
    *,
    unroll: int,
) -> dict[str, Step]:
    """Returns the steps to time: ours for each form of the rows and each backend; and each rival's
    for the first form, which keeps all blocks."""
    steps: dict[str, Step] = {
        f"{form}, {backend}": JaxStep(model, rows, LossConfig(attention=backend, unroll=unroll))
        for backend in backends
        for form, rows in packed.items()
    }
    for rival in rivals:
        rows, loss = next(iter(packed.values())), LossConfig()
        batches, denominators, _ = _prepared(model.config, rows, loss)
        steps[rival] = TorchStep(
            model.config,
            {name: np.asarray(value) for name, value in arrays_from_model(model).items()},
            jax.tree.map(lambda x: x[0], batches),
            denominators,
            loss,
            flops=_flops(model.config, rows),
            compiled=rival == "torch-compiled",
        )
    return steps


def _flops(model: ModelConfig, rows: PackedRows) -> float:
    count, length = rows.tokens.shape
    blocks = 0 if rows.prediction_blocks is None else rows.prediction_blocks.shape[1]
    config = TrainConfig(
        rows=count, row_length=length, block_size=BLOCK_SIZE, prediction_blocks=blocks
    )
    return model_flops(config, model)


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
    """Returns rows of one sample each, with random tokens, all trainable."""
    tokens = jax.random.randint(jax.random.key(0), (rows, length), 0, model.vocab_size)
    return PackedRows(
        tokens=tokens.astype(jnp.int32),
        positions=jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length)),
        segment_ids=jnp.ones((rows, length), jnp.int32),
        trainable=jnp.ones((rows, length), bool),
    )


def conversations(
    model: ModelConfig, rows: int, length: int, share: float
) -> dict[str, PackedRows]:
    """Makes rows of `SAMPLES` conversations of random tokens, once with all blocks in the
    prediction stream and once without those of prompts, a ``share`` of all."""
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
    few = dataclasses.replace(whole, prediction_blocks=jnp.asarray(np.stack(places)))
    return {"all blocks": whole, "prompts left out": few}


def check_agreement(steps: Mapping[str, Step]) -> None:
    """Raises `StepsDiffer` if the loss or a gradient of a step differs from the first step's."""
    names = list(steps)
    expected_loss, expected = steps[names[0]].run(), steps[names[0]].gradients()
    for name in names[1:]:
        loss = steps[name].run()
        if not abs(loss / expected_loss - 1) < LOSS_TOLERANCE:
            raise StepsDiffer(
                f"the loss is {loss:.7g} with {name}, {expected_loss:.7g} with {names[0]}"
            )
        for path, gradient in steps[name].gradients().items():
            error = np.linalg.norm(gradient - expected[path]) / np.linalg.norm(expected[path])
            if not error < GRADIENT_TOLERANCE:
                raise StepsDiffer(
                    f"the gradient of {path} differs by {error:.2g} between {name} and {names[0]}"
                )


def _timed(step: Step) -> tuple[float, float]:
    """Returns the milliseconds of a step, and its loss."""
    started = time.perf_counter()
    loss = step.run()
    return (time.perf_counter() - started) * 1e3, loss


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.step", lambda: main(sys.argv[1:])))
