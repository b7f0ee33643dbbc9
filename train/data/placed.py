"""Packed rows together with the blocks that are in their prediction streams."""

from __future__ import annotations

from typing import Any

import numpy as np

from train.data.order import RowSet
from wedlm_jax.errors import InputError
from wedlm_jax.packing import prediction_blocks


class PlacedRows:
    """Adds the places of its prediction blocks to each row of a set.

    Args:
      rows: the set.
      block_size: B.
      count: P, the blocks that a prediction stream has room for.
    """

    def __init__(self, rows: RowSet, block_size: int, count: int):
        self._rows, self._block_size, self._count = rows, block_size, count

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        """Reads a row: all fields of `wedlm_jax.corruption.PackedRows`.

        Raises:
          InputError: naming the row that needs more blocks than there is room for.
        """
        row = self._rows[index]
        try:
            blocks = prediction_blocks(row["trainable"], self._block_size, self._count)
        except ValueError as error:
            file, number = self.place(int(index))
            raise InputError(f"{file}: row {number}: {error}, as prediction_blocks has") from None
        return {**row, "prediction_blocks": blocks}

    def place(self, index: int) -> tuple[str, int]:
        """Finds the file that holds row ``index``, and its number there, from 0."""
        return self._rows.place(index)

    def __repr__(self) -> str:
        return f"PlacedRows({self._rows!r}, {self._block_size}, {self._count})"
