"""Computes cross entropy through the output projection, a chunk of tokens at a time.

The logits of all tokens at once would be the largest array of a training step by far, so they are
computed, used and dropped chunk by chunk. The weight of each token in the loss is known in advance,
and with it the gradient of the logits, so the pass that computes the loss computes the gradients,
too. This takes three products per token (logits, gradient of the hidden state, gradient of the
matrix); recomputing the logits in the backward pass would take four.

Tokens without a target are not computed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.model.quantization import product
from wedlm_jax.sharding import constrain, on_own_tokens, sum_over_tokens

TOKENS = ("batch", "length")


def weighted_cross_entropy(
    hidden: Array, head: Array, targets: Array, weights: Array, has_target: Array, *, chunk: int
) -> tuple[Array, Array, Array]:
    """Computes ``Σ weights · nll`` and, for reports, each token's nll and whether it was predicted.

    The gradient flows through the sum alone, into ``hidden`` and ``head``. The gradient of ``head``
    is summed in float32, over chunks and over devices.

    Args:
      hidden: ``[R, T, D]``, in the compute dtype.
      head: ``[V, D]``, in the dtype of the parameters.
      targets: int32 ``[R, T]``.
      weights: float32 ``[R, T]``; they depend on masks only.
      has_target: bool ``[R, T]``, which tokens have a target at all; the others are not computed.
      chunk: how many tokens' logits a device has in memory at once.

    Returns:
      The float32 sum; the negative log-likelihoods in nats, float32 ``[R, T]``; and whether the
      target has the largest logit, bool ``[R, T]``. The last two are 0 and False where there is
      no target.
    """
    weights = jnp.where(has_target, weights, 0.0)
    total, nll, hit = _cross_entropy(hidden, head, targets, weights, has_target, chunk)
    return total, jax.lax.stop_gradient(nll), hit


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropy(
    hidden: Array, head: Array, targets: Array, weights: Array, has_target: Array, chunk: int
) -> tuple[Array, Array, Array]:
    local = on_own_tokens(
        partial(_by_chunk, chunk=chunk),
        [(*TOKENS, None), (None, None), TOKENS, TOKENS],
        [TOKENS, TOKENS],
    )
    nll, hit = local(hidden, head.astype(hidden.dtype), targets, has_target)
    return (weights * nll).sum(), nll, hit


def _forward(*arguments: Any) -> tuple[tuple[Array, Array, Array], tuple[Array, Array | None]]:
    *primals, chunk = arguments
    hidden, head, targets, weights, has_target = (primal.value for primal in primals)
    # A frozen head gets no gradient, which would be as large as the head, in float32.
    by_head = primals[1].perturbed
    # While it goes through its own chunks, each device holds the whole matrix, and a whole sum of
    # its gradient.
    local = on_own_tokens(
        partial(_by_chunk, chunk=chunk, by_head=by_head),
        [(*TOKENS, None), (None, None), TOKENS, TOKENS, TOKENS],
        [TOKENS, TOKENS, (*TOKENS, None), *[(None, "hidden")] * by_head],
    )
    nll, hit, d_hidden, *d_head = local(
        hidden, head.astype(hidden.dtype), targets, has_target, weights
    )
    gradient = d_head[0].astype(head.dtype) if by_head else None
    return ((weights * nll).sum(), nll, hit), (d_hidden, gradient)


def _backward(
    _: int, gradients: tuple[Array, Array | None], cotangents: tuple[Array, Any, Any]
) -> tuple[Array | None, ...]:
    d_hidden, d_head = gradients
    scale = cotangents[0]
    by_head = None if d_head is None else scale * d_head
    return (scale * d_hidden).astype(d_hidden.dtype), by_head, None, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _by_chunk(
    hidden: Array,
    head: Array,
    targets: Array,
    has_target: Array,
    weights: Array | None = None,
    *,
    chunk: int,
    by_head: bool = False,
) -> tuple[Array, ...]:
    """Returns nll and hit; with ``weights`` also the gradient by ``hidden``, and by ``head``."""
    states, target = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def of_chunk(
        at: Array, counts: Array, d_head: Array | None
    ) -> tuple[tuple[Array, ...], Array | None]:
        nll, hit, slope = _of_chunk(states[at], head, target[at])
        if weights is None:
            return (nll, hit), None
        slope = slope * (weights.reshape(-1)[at] * counts)[:, None]
        d_states = product_in_float32(slope.astype(head.dtype), head).astype(hidden.dtype)
        if d_head is not None:
            # The gradients of logits stay float32 in this product, on devices that have one.
            d_head = d_head + jnp.matmul(slope.T, states[at].astype(jnp.float32))
            d_head = constrain(d_head, "vocab", None)
        return (nll, hit, d_states), d_head

    none = constrain(jnp.zeros(head.shape, jnp.float32), "vocab", None) if by_head else None
    rows: tuple[Array, ...]
    rows, d_head = in_chunks(of_chunk, none, has_target, chunk)
    return rows if d_head is None else (*rows, sum_over_tokens(d_head, "hidden", 1))


def _of_chunk(states: Array, head: Array, target: Array) -> tuple[Array, Array, Array]:
    """Returns the nll ``[C]`` of states ``[C, D]``, whether the target has the largest logit, and
    the gradient of each nll by its logits, float32 ``[C, V]``."""
    logits = constrain(product(states, head, jnp.float32), None, "vocab")
    top = logits.max(axis=-1, keepdims=True)
    shares = jnp.exp(logits - top)
    total = shares.sum(axis=-1, keepdims=True)
    # A masked sum instead of a gather: on a mesh each device sums its own part of the vocabulary,
    # where a gather would collect all logits.
    here = jnp.arange(logits.shape[-1]) == target[:, None]
    picked = jnp.where(here, logits, 0.0).sum(axis=-1, keepdims=True)
    nll = (top + jnp.log(total) - picked)[:, 0]
    return nll, (picked >= top)[:, 0], shares / total - here


product_in_float32 = partial(jnp.matmul, preferred_element_type=jnp.float32)


def in_chunks(of_chunk: Callable[..., Any], total: Any, has_target: Array, chunk: int) -> Any:
    """Computes rows for the tokens with a target, a chunk of them at a time: they are moved to the
    front, and the loop goes over the chunks that contain some.

    Args:
      of_chunk: maps the indices of C = ``chunk`` tokens, which of these count (the last chunk is
        padded) and the total so far to a tuple of rows ``[C, ...]`` and the new total.
      total: the total to begin with; any tree.
      has_target: bool ``[R, T]``.

    Returns:
      the rows ``[R, T, ...]``, 0 where there is no target, and the total.
    """
    flat = has_target.reshape(-1)
    chunk = min(chunk, len(flat))
    count = flat.sum(dtype=jnp.int32)
    before = jnp.cumsum(flat, dtype=jnp.int32)
    index = jnp.arange(len(flat), dtype=jnp.int32)
    place = jnp.where(flat, before - 1, count + index - before)
    order = jnp.zeros_like(index).at[place].set(index, unique_indices=True)
    order = jnp.pad(order, (0, -len(flat) % chunk), mode="edge")

    def body(number: Array, results: tuple[Any, Any]) -> tuple[Any, Any]:
        start = number * chunk
        at = jax.lax.dynamic_slice_in_dim(order, start, chunk)
        rows, total = of_chunk(at, start + jnp.arange(chunk) < count, results[1])
        put = jax.lax.dynamic_update_slice_in_dim
        return tuple(put(x, y, start, 0) for x, y in zip(results[0], rows, strict=True)), total

    shapes, _ = jax.eval_shape(of_chunk, order[:chunk], order[:chunk] < 0, total)
    rows = tuple(jnp.zeros((len(order), *x.shape[1:]), x.dtype) for x in shapes)
    rows, total = jax.lax.fori_loop(0, -(-count // chunk), body, (rows, total))
    place = place.reshape(has_target.shape)
    return tuple(_where(has_target, x[place]) for x in rows), total


def _where(has_target: Array, rows: Array) -> Array:
    has_target = has_target.reshape(*has_target.shape, *[1] * (rows.ndim - has_target.ndim))
    return jnp.where(has_target, rows, jnp.zeros((), rows.dtype))
