"""The rows of a forward whose logits are looked at."""

from __future__ import annotations

import dataclasses

import jax
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class HeadRows:
    """The rows that pass the head, of all sequences together, ``[R]`` each.

    Attributes:
      sequence: int32, whose it is, 0 .. N-1; 0 for padding.
      slot: int32, the window slot whose token it predicts.
      valid: bool, False for padding.
      is_mask: bool, it is a mask and predicts itself; else it is that of the token before the
        slot, and predicts what comes next.
    """

    sequence: Array
    slot: Array
    valid: Array
    is_mask: Array
