"""How probable a filled token was, by the forward that filled it.

The numbers are those of the model itself: the log-softmax of a mask's logits, the mask token
left out, before bias, penalties, forbidden tokens, temperature and truncation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Of tokens in an array ``[...]``, in nats.

    Attributes:
      chosen: float32 ``[...]``, of each token itself.
      top_ids: int32 ``[..., k]``, the most probable tokens in its place, most probable first.
      top: float32 ``[..., k]``, theirs.
    """

    chosen: Array
    top_ids: Array
    top: Array


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Of one committed token: its log-probability in nats, and the most probable tokens in its
    place with theirs, most probable first (the token itself may be among them)."""

    logprob: float
    top: list[tuple[int, float]]


def empty_logprobs(shape: tuple[int, ...], k: int) -> Logprobs:
    wide = (*shape, k)
    return Logprobs(jnp.zeros(shape), jnp.zeros(wide, jnp.int32), jnp.zeros(wide))


def token_logprobs(logits: Array, tokens: Array, k: int) -> Logprobs:
    """Of ``tokens [...]`` under the softmax of ``logits [..., V]``, k alternatives each."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, top_ids = jax.lax.top_k(logits, k)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
    return Logprobs(chosen[..., 0], top_ids.astype(jnp.int32), top - total)


def as_list(values: Logprobs, row: int, length: int, k: int) -> list[TokenLogprob]:
    """The first ``length`` tokens of a row of fetched `Logprobs`, ``k`` alternatives each."""
    chosen = values.chosen[row, :length].tolist()
    ids, top = values.top_ids[row, :length, :k].tolist(), values.top[row, :length, :k].tolist()
    return [
        TokenLogprob(one, list(zip(some, theirs, strict=True)))
        for one, some, theirs in zip(chosen, ids, top, strict=True)
    ]
