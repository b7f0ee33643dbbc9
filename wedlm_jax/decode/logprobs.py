"""Log-probabilities of tokens in the forward that chose them.

These are the model's own probabilities: the log-softmax of a row's logits over the vocabulary that
may be chosen (`wedlm_jax.decode.options.Vocabulary`), before bias, penalties, forbidden tokens,
temperature and truncation.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from wedlm_jax.sharding import AXIS_RULES, shards


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Logprobs:
    """Log-probabilities of tokens in an array ``[...]``, in nats.

    Attributes:
      chosen: float32 ``[...]``, log-probabilities of the tokens themselves.
      top_ids: int32 ``[..., k]``, the most probable tokens in their place, most probable first.
      top: float32 ``[..., k]``, log-probabilities of ``top_ids``.
    """

    chosen: Array
    top_ids: Array
    top: Array


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of one committed token in nats, and the ids and log-probabilities of the
    most probable tokens in its place, most probable first; the token itself may be among them."""

    logprob: float
    top: list[tuple[int, float]]


def empty_logprobs(shape: tuple[int, ...], k: int) -> Logprobs:
    """Allocates log-probabilities for tokens of shape ``shape``, with k alternatives each."""
    wide = (*shape, k)
    return Logprobs(jnp.zeros(shape), jnp.zeros(wide, jnp.int32), jnp.zeros(wide))


def token_logprobs(logits: Array, tokens: Array, k: int) -> Logprobs:
    """Returns the log-probabilities of ``tokens [...]`` under the softmax of ``logits [..., V]``,
    with k alternatives each; if the vocabulary has fewer than k tokens, the rest are token 0 at
    −inf."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    chosen = jnp.take_along_axis(logits, tokens[..., None], axis=-1) - total
    there = min(k, logits.shape[-1])
    missing = [(0, 0)] * (logits.ndim - 1) + [(0, k - there)]
    top, top_ids = _top_k(logits, there)
    top = jnp.pad(top - total, missing, constant_values=-jnp.inf)
    return Logprobs(chosen[..., 0], jnp.pad(top_ids.astype(jnp.int32), missing), top)


def _top_k(logits: Array, k: int) -> tuple[Array, Array]:
    """Computes `jax.lax.top_k` without gathering the vocabulary: each device takes the top k of its
    own part, then the top k of these are taken."""
    parts, vocab = shards("vocab"), logits.shape[-1]
    if parts == 1 or vocab % parts:
        return jax.lax.top_k(logits, k)
    size, axes = vocab // parts, AXIS_RULES["vocab"]

    def of_part(part: Array) -> tuple[Array, Array]:
        top, top_ids = jax.lax.top_k(part, min(k, size))
        return top, top_ids + jax.lax.axis_index(axes) * size

    cut = PartitionSpec(*[None] * (logits.ndim - 1), axes)
    # Without this the compiler gathers all logits on every device (on CPUs, JAX 0.10 and 0.12).
    top, top_ids = jax.shard_map(
        of_part, in_specs=cut, out_specs=(cut, cut), axis_names=frozenset(axes), check_vma=False
    )(logits)
    # Parts are in order of the vocabulary, so of equal logits the lower id still comes first.
    top, at = jax.lax.top_k(top, k)
    return top, jnp.take_along_axis(top_ids, at, axis=-1)


def as_list(values: Logprobs, index: int, length: int, k: int) -> list[TokenLogprob]:
    """Returns the log-probabilities of the first ``length`` tokens of sequence ``index``, from
    fetched `Logprobs` ``[N, E]``, with ``k`` alternatives each."""
    chosen = np.asarray(values.chosen[index, :length]).tolist()
    ids = np.asarray(values.top_ids[index, :length, :k]).tolist()
    top = np.asarray(values.top[index, :length, :k]).tolist()
    return [
        TokenLogprob(logprob, list(zip(top_ids, top_logprobs, strict=True)))
        for logprob, top_ids, top_logprobs in zip(chosen, ids, top, strict=True)
    ]
