"""Packs samples of any length into examples of one length, aligned to blocks, on the host.

Every sample is padded to a multiple of the block size, so blocks are the same static pattern in
every packed example and only segment ids vary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from wedlm_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class TokenisedSample:
    """One sample: int32 ``tokens [n]`` and bool ``trainable [n]``, False on the prompt."""

    tokens: np.ndarray
    trainable: np.ndarray


def pack(
    samples: Iterable[TokenisedSample], *, row_length: int, block_size: int, open_rows: int = 16
) -> Iterator[list[TokenisedSample]]:
    """Packs samples first-fit into a bounded number of open examples.

    Args:
      row_length: L, the length of a packed example, a multiple of ``block_size``.
      block_size: B; the room for a sample is rounded up to a multiple of it.
      open_rows: how many examples are open; if a sample fits into none, the fullest is emitted.

    Yields:
      the samples of one packed example, in order.

    Raises:
      InputError: a sample is empty or longer than a packed example.
    """
    if row_length % block_size:
        raise InputError(
            f"row length {row_length} is not a multiple of the block size {block_size}"
        )
    rows: list[tuple[int, list[TokenisedSample]]] = []
    for number, sample in enumerate(samples):
        size = len(sample.tokens)
        if not 0 < size <= row_length:
            raise InputError(
                f"sample {number} has {size} tokens; a packed example takes 1 to {row_length}"
            )
        # Rounded up to whole blocks, so that the next sample begins a new block.
        room = -(-size // block_size) * block_size
        place = next((i for i, (used, _) in enumerate(rows) if used + room <= row_length), None)
        if place is None:
            # Bounded, so that an endless stream is packed in bounded memory.
            if len(rows) == open_rows:
                fullest = max(range(len(rows)), key=lambda i: rows[i][0])
                yield rows.pop(fullest)[1]
            rows.append((0, []))
            place = len(rows) - 1
        used, members = rows[place]
        members.append(sample)
        rows[place] = (used + room, members)
    for _, members in rows:
        yield members


def row_arrays(
    samples: list[TokenisedSample], *, row_length: int, block_size: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Returns the arrays of one packed example: fields of `wedlm_jax.corruption.PackedRows`,
    ``[L]`` each."""
    row = {
        "tokens": np.full(row_length, pad_token_id, np.int32),
        "positions": np.zeros(row_length, np.int32),
        "segment_ids": np.zeros(row_length, np.int32),
        "trainable": np.zeros(row_length, bool),
    }
    start = 0
    for segment, sample in enumerate(samples, 1):  # 0 is padding
        size = len(sample.tokens)
        here = slice(start, start + size)
        row["tokens"][here] = sample.tokens
        # Positions start from 0, so that a sample is trained as if it were alone.
        row["positions"][here] = np.arange(size)
        row["segment_ids"][here] = segment
        row["trainable"][here] = sample.trainable
        start += -(-size // block_size) * block_size
    return row


def trainable_blocks(trainable: np.ndarray, block_size: int) -> np.ndarray:
    """Returns which blocks have a trainable token: bool ``[..., L / B]``, from ``[..., L]``."""
    blocks = trainable.reshape(*trainable.shape[:-1], -1, block_size)
    return np.asarray(blocks.any(-1))


def blocks_to_predict(samples: Iterable[TokenisedSample], block_size: int) -> int:
    """Returns how many blocks of an example, in which each sample begins a new one, have a
    trainable token."""
    blocks = (np.flatnonzero(sample.trainable) // block_size for sample in samples)
    return sum(len(np.unique(some)) for some in blocks)


def prediction_blocks(trainable: np.ndarray, block_size: int, count: int) -> np.ndarray:
    """Returns the numbers of the blocks that the prediction stream of an example with ``trainable
    [L]`` must have, int32 ``[count]`` as in `wedlm_jax.corruption.PackedRows`; raises a
    `ValueError` if there are more than ``count``."""
    found = np.flatnonzero(trainable_blocks(trainable, block_size))
    if len(found) > count:
        raise ValueError(f"{len(found)} blocks have tokens to train on, more than {count}")
    blocks = np.full(count, len(trainable) // block_size, np.int32)
    blocks[: len(found)] = found
    return blocks
