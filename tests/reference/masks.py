"""Attention patterns as 0/1 matrices, decided one pair of tokens at a time."""

import numpy as np


def from_drawing(text):
    """bool matrix of a drawing: a line a row, ``1`` seen, ``.`` not seen, else ignored.

    Row labels stand before a ``|``; a line without one is a heading.
    """
    lines = [line.split("|")[1] for line in text.splitlines() if "|" in line]
    return np.array([[mark == "1" for mark in line if mark in "1."] for line in lines])


def causal_matrix(segment_ids):
    """bool ``[L, L]``: earlier or equal, of the same segment, which is not padding (0)."""
    length = len(segment_ids)
    return np.array(
        [[j <= i and _same_sample(segment_ids, i, j) for j in range(length)] for i in range(length)]
    )


def dual_stream_matrix(segment_ids, block_size):
    """bool ``[2L, 2L]``: the memory stream, then the prediction stream in physical order."""
    length = len(segment_ids)
    matrix = np.zeros((2 * length, 2 * length), bool)
    for row in range(2 * length):
        for column in range(2 * length):
            i, j = row % length, column % length
            if not _same_sample(segment_ids, i, j):
                continue
            row_predicts, column_predicts = row >= length, column >= length
            block_i, block_j = i // block_size, j // block_size
            if row_predicts and column_predicts:
                matrix[row, column] = block_i == block_j and j <= i
            elif row_predicts:
                matrix[row, column] = block_j < block_i
            elif not column_predicts:
                matrix[row, column] = j <= i
    return matrix


def _same_sample(segment_ids, i, j):
    return segment_ids[i] == segment_ids[j] != 0
