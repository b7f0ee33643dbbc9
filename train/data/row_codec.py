"""A packed row as bytes, and back.

Little-endian: how many samples there are, the length of each, then their tokens one after
another (uint32 each), then their trainable flags, eight to a byte. Padding, positions and segment
ids follow from the lengths, because every sample begins at a multiple of the block size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wedlm_jax.packing import TokenisedSample, row_arrays

_WORD = np.dtype("<u4")


def encode_row(samples: Sequence[TokenisedSample]) -> bytes:
    sizes = [len(sample.tokens) for sample in samples]
    tokens = np.concatenate([sample.tokens for sample in samples])
    trainable = np.concatenate([sample.trainable for sample in samples])
    words = np.concatenate([np.array([len(sizes), *sizes], _WORD), tokens.astype(_WORD)])
    return words.tobytes() + np.packbits(trainable).tobytes()


def decode_row(
    record: bytes, *, row_length: int, block_size: int, pad_token_id: int
) -> dict[str, np.ndarray]:
    """Reads the arrays of `wedlm_jax.packing.row_arrays`, ``[L]`` each.

    Raises:
      ValueError: ``record`` is not a row of these sizes.
    """
    samples = decode_samples(record)
    room = sum(-(-len(sample.tokens) // block_size) * block_size for sample in samples)
    if not 0 < room <= row_length:
        raise ValueError(f"{len(samples)} samples take {room} tokens of {row_length}")
    return row_arrays(
        samples, row_length=row_length, block_size=block_size, pad_token_id=pad_token_id
    )


def decode_samples(record: bytes) -> list[TokenisedSample]:
    """Reads the samples of a row.

    Raises:
      ValueError: ``record`` is no row.
    """
    count = int(np.frombuffer(record, _WORD, 1)[0])
    sizes = np.frombuffer(record, _WORD, count, _WORD.itemsize).astype(np.int64)
    total = int(sizes.sum())
    start = (1 + count) * _WORD.itemsize
    end = start + total * _WORD.itemsize
    if len(record) != end + -(-total // 8):
        raise ValueError(f"{len(record)} bytes, where {total} tokens take another number")
    tokens = np.frombuffer(record, _WORD, total, start).astype(np.int32)
    trainable = np.unpackbits(np.frombuffer(record, np.uint8, offset=end), count=total)
    ends = np.cumsum(sizes)[:-1]
    parts = zip(np.split(tokens, ends), np.split(trainable.astype(bool), ends), strict=True)
    return [TokenisedSample(ids, flags) for ids, flags in parts]
