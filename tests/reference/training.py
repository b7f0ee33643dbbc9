"""The dual-stream sample and its losses for one sample at a time: no packing, no padding,
no chunks, float64. Source: WeDLM section 4."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.reference.masks import dual_stream_matrix


@dataclasses.dataclass(frozen=True)
class MaskedSample:
    """One sample in logical order, ``[n]`` each; ``ratio`` is the γ of the token's block."""

    tokens: np.ndarray
    trainable: np.ndarray
    masked: np.ndarray
    ratio: np.ndarray


@dataclasses.dataclass(frozen=True)
class Streams:
    """The sample's physical input ``[2n]``, who sees whom ``[2n, 2n]``, and what each
    prediction row is to say ``[n]``."""

    token_ids: np.ndarray
    positions: np.ndarray
    matrix: np.ndarray
    targets: np.ndarray
    masked: np.ndarray
    ratio: np.ndarray


def block_order(masked, block_size):
    """Logical indices in physical order: in each block the observed, then the masked."""
    order = []
    for start in range(0, len(masked), block_size):
        block = range(start, min(start + block_size, len(masked)))
        order += [i for i in block if not masked[i]]
        order += [i for i in block if masked[i]]
    return order


def dual_streams(sample, block_size, mask_token_id):
    length = len(sample.tokens)
    order = block_order(sample.masked.tolist(), block_size)
    predicted = [mask_token_id if sample.masked[i] else sample.tokens[i] for i in order]
    return Streams(
        token_ids=np.array([*sample.tokens, *predicted]),
        positions=np.array([*range(length), *order]),
        matrix=dual_stream_matrix([1] * length, block_size),
        targets=sample.tokens[order],
        masked=sample.masked[order],
        ratio=sample.ratio[order],
    )


def log_softmax(logits):
    logits = logits.astype(np.float64)
    logits = logits - logits.max(-1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def cross_entropy(logits, targets):
    """Nats ``[T]`` of whole logits ``[T, V]``."""
    return -log_softmax(logits)[np.arange(len(targets)), targets]


def cross_entropy_gradients(hidden, head, targets, weights):
    """Gradients of ``Σ weights · cross entropy`` by ``hidden [T, D]`` and ``head [V, D]``."""
    hidden, head = hidden.astype(np.float64), head.astype(np.float64)
    by_logits = np.exp(log_softmax(hidden @ head.T))
    by_logits[np.arange(len(targets)), targets] -= 1
    by_logits *= weights[:, None]
    return by_logits @ head, by_logits.T @ hidden


def wedlm_losses(samples, logits, *, block_size, weighting="inverse_ratio", ar_weight=1.0):
    """Computes the losses and accuracies of a batch of samples.

    Args:
      logits: those of each sample, ``[2n, V]``: of its memory stream, then its prediction stream.
    """
    mlm = mlm_weight = ar = 0.0
    masked_hits, ar_hits = [], []
    for sample, rows in zip(samples, logits, strict=True):
        length = len(sample.tokens)
        streams = dual_streams(sample, block_size, mask_token_id=0)
        nats = cross_entropy(rows[length:], streams.targets)
        hits = rows[length:].argmax(-1) == streams.targets
        for i in range(length):
            if streams.masked[i]:
                weight = 1 / (streams.ratio[i] + 1e-8) if weighting == "inverse_ratio" else 1.0
                mlm += weight * nats[i]
                mlm_weight += weight
                masked_hits.append(hits[i])
        memory, targets, counted = rows[: length - 1], sample.tokens[1:], sample.trainable[1:]
        ar += cross_entropy(memory, targets)[counted].sum()
        ar_hits += (memory.argmax(-1) == targets)[counted].tolist()
    mlm, ar = mlm / max(mlm_weight, 1e-30), ar / max(len(ar_hits), 1)
    return {
        "mlm_loss": mlm,
        "ar_loss": ar,
        "loss": (mlm + ar_weight * ar) / (1 + ar_weight),
        "masked_accuracy": sum(masked_hits) / max(len(masked_hits), 1),
        "ar_accuracy": sum(ar_hits) / max(len(ar_hits), 1),
    }
