"""The training losses, as sums that are divided once by a global denominator.

Denominators depend on the masks only, not on the parameters. So the caller sums them over the
global batch (accumulation steps and devices included) before any gradient is computed, and every
micro-batch contributes its exact share, which a mean of the micro-batches' means would not.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jax import Array

from wedlm_jax.corruption import DualStreamBatch, PackedRows, next_token_targets
from wedlm_jax.masks import PAD_SEGMENT, CausalMask, Mask
from wedlm_jax.model import Transformer
from wedlm_jax.model.cross_entropy import weighted_cross_entropy
from wedlm_jax.sharding import shards

RATIO_EPSILON = 1e-8

RATIO_BINS = 4
"""The number of bins of the mask ratio, equal parts of (0, 1], for which the MLM loss is reported.
"""

SUBLANES = 16
"""The rows of a TPU's bfloat16 tile; chunks are multiples of it."""

WEIGHTINGS = ("inverse_ratio", "uniform")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The options of the loss and of its computation.

    Attributes:
      weighting: "inverse_ratio" weights a masked token by 1 / (γ + ε), "uniform" by 1.
      ar_weight: a in (MLM + a·AR) / (1 + a).
      chunk: the most tokens whose logits a device has in memory at once; see `head_chunks`.
      dtype, remat, attention, tile, unroll: passed to the model.
    """

    weighting: str = "inverse_ratio"
    ar_weight: float = 1.0
    chunk: int = 2048
    dtype: str = "float32"
    remat: str = "none"
    attention: str = "streams"
    tile: int = 0
    unroll: int = 1

    def __post_init__(self) -> None:
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting {self.weighting!r}: inverse_ratio or uniform")


SURPRISE = 0.1
"""The share of micro-batches that may need one more chunk than `head_chunks` plans. A smaller share
would require larger chunks for all."""


def head_chunks(
    most: int,
    shape: tuple[int, int],
    prediction: int,
    block_size: int,
    *,
    batch: int,
    sequence: int,
) -> tuple[int, int]:
    """Returns in how many chunks a device computes the vocabulary loss of a micro-batch, and the
    tokens per chunk. There are as few chunks as ``most`` allows, and all are full on the device
    with the most targets, for which the others wait.

    In a block of B tokens, round(γB) are masked: B/2 on average, with variance (B² + 2) / 12. So
    the number of masks on a device with n blocks is about normal, with variance
    σ² = n (B² + 2) / 12. It exceeds its mean by z σ with a probability of at most exp(-z²/2) / 2;
    the probability that any of N devices does is at most N times that. z is chosen so that this is
    `SURPRISE`. In the memory, all tokens that can be masked have a target. Rows with prompts or
    padding have fewer targets, and take fewer chunks.

    Args:
      most: the most tokens per chunk.
      shape: the rows of the micro-batch over all devices, and L.
      prediction: tokens of a row's prediction stream; 0 without one.
      block_size: B.
      batch, sequence: how many devices share the rows, and how many share the tokens of each row.
    """
    rows, length = -(-shape[0] // batch), shape[1]
    tokens = -(-(length + prediction) // sequence)
    # The device with most of the memory has the most targets; half of its other tokens are masked.
    memory = min(length, tokens)
    others = tokens - memory
    targets = min(memory, prediction or length) + others / 2
    deviation = math.sqrt(rows * others / block_size * (block_size**2 + 2) / 12)
    above = math.sqrt(2 * math.log(batch * sequence / (2 * SURPRISE)))
    expected = min(rows * targets + above * deviation, rows * tokens)
    count = math.ceil(expected / most)
    return count, min(most, math.ceil(expected / count / SUBLANES) * SUBLANES)


def hidden_states(
    model: Transformer, token_ids: Array, positions: Array, mask: Mask, config: LossConfig
) -> Array:
    """Returns the final hidden states ``[R, T, D]``, computed with the options of ``config``."""
    names = ("remat", "attention", "tile", "unroll")
    options = {name: getattr(config, name) for name in names}
    return model(token_ids, positions, mask, dtype=jnp.dtype(config.dtype), **options)


def masked_weights(masked: Array, mask_ratio: Array, weighting: str) -> Array:
    """Returns the float32 weights wᵢ of the MLM loss, 0 where not masked (WeDLM eq. 8).

    A block with ratio γ has about γ·B masks. Weighting each by 1/γ gives every block the same total
    weight: this is the masked-diffusion bound on the likelihood, an average over γ.
    """
    weights = 1.0 / (mask_ratio + RATIO_EPSILON) if weighting == "inverse_ratio" else 1.0
    return jnp.where(masked, weights, 0.0)


def wedlm_denominators(batch: DualStreamBatch, config: LossConfig) -> dict[str, Array]:
    """Returns Σ wᵢ over masked tokens, the number of masked tokens, in total and by mask ratio, and
    the number of AR targets. If rows have a source, also the first and last of these, and the
    number of tokens, by source."""
    weights = masked_weights(batch.masked, batch.mask_ratio, config.weighting)
    totals = {
        "mlm": weights.sum(),
        "masked": batch.masked.sum().astype(jnp.float32),
        "masked_by_ratio": _by_ratio(batch, batch.masked),
    }
    if batch.source is not None:
        totals["mlm_by_source"] = _by_source(batch.source, weights)
    return totals | _ar_totals(batch.next_valid, batch.source, batch.mask.segment_ids)


def _ar_totals(valid: Array, source: Array | None, segment_ids: Array) -> dict[str, Array]:
    totals = {"ar": valid.sum().astype(jnp.float32)}
    if source is not None:
        totals["ar_by_source"] = _by_source(source, valid)
        totals["tokens_by_source"] = _by_source(source, segment_ids != PAD_SEGMENT)
    return totals


def _by_ratio(batch: DualStreamBatch, values: Array) -> Array:
    """Sums values ``[R, N]`` of masked tokens by bin of their mask ratio: ``[RATIO_BINS]``."""
    place = jnp.ceil(batch.mask_ratio * RATIO_BINS) - 1
    inside = (place[..., None] == jnp.arange(RATIO_BINS)) & batch.masked[..., None]
    return jnp.where(inside, values[..., None], 0.0).sum(axis=(0, 1))


def _by_source(source: Array, values: Array) -> Array:
    """Sums values ``[R, L]`` by the rows' source ``[R, S]``: float32 ``[S]``."""
    of_row = values.sum(axis=1).astype(jnp.float32)
    return jnp.where(source, of_row[:, None], 0.0).sum(axis=0)


def wedlm_loss(
    model: Transformer, batch: DualStreamBatch, denominators: dict[str, Array], config: LossConfig
) -> tuple[Array, dict[str, Array]]:
    """Returns this batch's share of the total loss (WeDLM eqs. 8-10), given the denominators of the
    global batch from `wedlm_denominators`.

    Returns:
      The scalar share of (MLM + a·AR) / (1 + a), and the shares of ``mlm_loss``, ``ar_loss``,
      ``masked_accuracy``, ``ar_accuracy`` and ``mlm_loss_by_ratio`` (``[RATIO_BINS]``, the
      unweighted mean over the masks of a bin); if rows have a source, also of
      ``mlm_loss_by_source`` and ``ar_loss_by_source`` (``[S]``). The shares of all micro-batches
      sum to the global batch's values.
    """
    hidden = hidden_states(model, batch.token_ids, batch.positions, batch.mask, config)
    a = config.ar_weight
    weights = masked_weights(batch.masked, batch.mask_ratio, config.weighting)
    loss, nll, hit = weighted_cross_entropy(
        hidden,
        model.head_matrix(),
        jnp.concatenate([batch.next_targets, batch.targets], axis=1),
        # A token's weight in the total is known before its logits are.
        jnp.concatenate(
            [
                _share(a / (1.0 + a) * batch.next_valid, denominators["ar"]),
                _share(weights / (1.0 + a), denominators["mlm"]),
            ],
            axis=1,
        ),
        jnp.concatenate([batch.next_valid, batch.masked], axis=1),
        chunk=_chunk(config, batch.next_valid, batch.masked.shape[1], batch.mask.block_size),
    )
    length = batch.next_valid.shape[1]
    (ar, mlm), (ar_hit, mlm_hit) = (jnp.split(x, [length], axis=1) for x in (nll, hit))
    shares = {
        "mlm_loss": _share((weights * mlm).sum(), denominators["mlm"]),
        "ar_loss": _share((batch.next_valid * ar).sum(), denominators["ar"]),
        "masked_accuracy": _share((batch.masked & mlm_hit).sum(), denominators["masked"]),
        "ar_accuracy": _share((batch.next_valid & ar_hit).sum(), denominators["ar"]),
        "mlm_loss_by_ratio": _share(_by_ratio(batch, mlm), denominators["masked_by_ratio"]),
    }
    if batch.source is not None:
        for name, nll, weight in (("mlm", mlm, weights), ("ar", ar, batch.next_valid)):
            total = _by_source(batch.source, weight * nll)
            shares[f"{name}_loss_by_source"] = _share(total, denominators[f"{name}_by_source"])
    return loss, shares


def ar_denominators(rows: PackedRows) -> dict[str, Array]:
    """Returns the number of next-token targets; if rows have a source, also these and the number of
    tokens by source."""
    return _ar_totals(next_token_targets(rows)[1], rows.source, rows.segment_ids)


def ar_loss(
    model: Transformer, rows: PackedRows, denominators: dict[str, Array], config: LossConfig
) -> tuple[Array, dict[str, Array]]:
    """Returns this batch's share of the plain next-token loss, in the form of `wedlm_loss`."""
    targets, valid = next_token_targets(rows)
    mask = CausalMask(rows.segment_ids)
    hidden = hidden_states(model, rows.tokens, rows.positions, mask, config)
    weights = _share(valid, denominators["ar"])
    loss, nll, hit = weighted_cross_entropy(
        hidden, model.head_matrix(), targets, weights, valid, chunk=_chunk(config, valid)
    )
    shares = {"ar_loss": loss, "ar_accuracy": _share((valid & hit).sum(), denominators["ar"])}
    if rows.source is not None:
        total = _by_source(rows.source, valid * nll)
        shares["ar_loss_by_source"] = _share(total, denominators["ar_by_source"])
    return loss, shares


def _chunk(config: LossConfig, memory: Array, prediction: int = 0, block_size: int = 1) -> int:
    """Returns `head_chunks`' chunk for a memory stream ``[R, L]`` on the current mesh."""
    rows, length = memory.shape
    over = {"batch": shards("batch"), "sequence": shards("length")}
    return head_chunks(config.chunk, (rows, length), prediction, block_size, **over)[1]


def _share(total: Array, denominator: Array) -> Array:
    """Returns ``total / denominator``; 0 if the global batch has no such token at all."""
    return total.astype(jnp.float32) / jnp.maximum(denominator, jnp.finfo(jnp.float32).tiny)
