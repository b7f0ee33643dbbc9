"""Cross entropy through the output projection, a chunk of tokens at a time.

The logits of all tokens at once would be the largest array of a training step by far, so they are
computed, used and dropped chunk by chunk. The weight of each token in the loss is known in advance,
and with it the gradient of the logits, so the pass that computes the loss computes the gradients,
too. This takes three products per token (logits, gradient of the hidden state, gradient of the
matrix); recomputing the logits in the backward pass would take four.

Tokens without a target are not computed: those with one are moved to the front, and a loop runs
over the chunks that contain some.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.model.quantization import product
from wedlm_jax.sharding import constrain, on_own_tokens, sum_over_tokens

TOKENS = ("batch", "length")


def weighted_cross_entropy(
    hidden: Array, head: Array, targets: Array, weights: Array, wanted: Array, *, chunk: int
) -> tuple[Array, Array, Array]:
    """Computes ``Σ weights · nll`` and, for reports, each token's nll and whether it was predicted.

    The gradient flows through the sum alone, into ``hidden`` and ``head``. The gradient of ``head``
    is summed in float32, over chunks and over devices.

    Args:
      hidden: ``[R, T, D]``, in the compute dtype.
      head: ``[V, D]``, in the dtype of the parameters.
      targets: int32 ``[R, T]``.
      weights: float32 ``[R, T]``; they depend on masks only.
      wanted: bool ``[R, T]``, which tokens have a target at all; the others are not computed.
      chunk: how many tokens' logits a device has in memory at once.

    Returns:
      The float32 sum; the negative log-likelihoods in nats, float32 ``[R, T]``; and whether the
      target has the largest logit, bool ``[R, T]``. The last two are 0 and False where not wanted.
    """
    weights = jnp.where(wanted, weights, 0.0)
    total, nll, hit = _cross_entropy(hidden, head, targets, weights, wanted, chunk)
    return total, jax.lax.stop_gradient(nll), hit


@partial(jax.custom_vjp, nondiff_argnums=(5,))
def _cross_entropy(
    hidden: Array, head: Array, targets: Array, weights: Array, wanted: Array, chunk: int
) -> tuple[Array, Array, Array]:
    local = on_own_tokens(
        partial(_loss, chunk=chunk),
        [(*TOKENS, None), (None, None), TOKENS, TOKENS],
        [TOKENS, TOKENS],
    )
    nll, hit = local(hidden, head.astype(hidden.dtype), targets, wanted)
    return (weights * nll).sum(), nll, hit


def _forward(
    *arguments: Any,
) -> tuple[tuple[Array, Array, Array], tuple[Array, Array | None]]:
    *primals, chunk = arguments
    hidden, head, targets, weights, wanted = (primal.value for primal in primals)
    # A frozen head gets no gradient, which would be as large as the head, in float32.
    by_head = primals[1].perturbed
    # While it goes through its own chunks, each device holds the whole matrix, and a whole sum of
    # its gradient.
    local = on_own_tokens(
        partial(_loss_and_gradients, chunk=chunk, by_head=by_head),
        [(*TOKENS, None), (None, None), TOKENS, TOKENS, TOKENS],
        [TOKENS, TOKENS, (*TOKENS, None), *[(None, "hidden")] * by_head],
    )
    nll, hit, d_hidden, *d_head = local(hidden, head.astype(hidden.dtype), targets, weights, wanted)
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


def _loss(
    hidden: Array, head: Array, targets: Array, wanted: Array, *, chunk: int
) -> tuple[Array, Array]:
    order, place, count, chunk = wanted_first(wanted, chunk)
    states, target = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1)

    def body(number: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        indices = part_of(order, number, chunk)
        nll, hit, _ = _of_chunk(states[indices], head, target[indices])
        return put_part(results[0], nll, number), put_part(results[1], hit, number)

    start = jnp.zeros(len(order), jnp.float32), jnp.zeros(len(order), bool)
    nll, hit = jax.lax.fori_loop(0, -(-count // chunk), body, start)
    return jnp.where(wanted, nll[place], 0.0), wanted & hit[place]


def _loss_and_gradients(
    hidden: Array,
    head: Array,
    targets: Array,
    weights: Array,
    wanted: Array,
    *,
    chunk: int,
    by_head: bool,
) -> tuple[Array, ...]:
    order, place, count, chunk = wanted_first(wanted, chunk)
    width = hidden.shape[-1]
    states, target = hidden.reshape(-1, width), targets.reshape(-1)
    # The last chunk is padded with tokens of weight 0: without a target, or computed before.
    weight = weights.reshape(-1)[order] * (jnp.arange(len(order)) < count)

    def body(number: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
        indices = part_of(order, number, chunk)
        nll, hit, slope = _of_chunk(states[indices], head, target[indices])
        slope = slope * part_of(weight, number, chunk)[:, None]
        d_states = jnp.matmul(
            slope.astype(head.dtype), head, preferred_element_type=jnp.float32
        ).astype(hidden.dtype)
        chunks = (
            put_part(x, y, number) for x, y in zip(results, (nll, hit, d_states), strict=False)
        )
        if not by_head:
            return tuple(chunks)
        # The gradients of logits stay float32 in this product, on devices that have one.
        d_head = results[3] + jnp.matmul(slope.T, states[indices].astype(jnp.float32))
        return *chunks, constrain(d_head, "vocab", None)

    start: tuple[Array, ...] = (
        jnp.zeros(len(order), jnp.float32),
        jnp.zeros(len(order), bool),
        jnp.zeros((len(order), width), hidden.dtype),
    )
    if by_head:
        start = *start, constrain(jnp.zeros(head.shape, jnp.float32), "vocab", None)
    nll, hit, d_states, *d_head = jax.lax.fori_loop(0, -(-count // chunk), body, start)
    d_hidden = d_states[place]  # zeros for tokens in no chunk
    nll, hit = jnp.where(wanted, nll[place], 0.0), wanted & hit[place]
    return nll, hit, d_hidden, *(sum_over_tokens(x, "hidden", 1) for x in d_head)


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


def wanted_first(wanted: Array, chunk: int) -> tuple[Array, Array, Array, int]:
    """Orders tokens for the loop.

    Returns:
      the indices of the tokens, wanted ones first, int32 ``[N]`` padded to whole chunks; each
      token's place in that order, in the shape of ``wanted``; how many are wanted; and the tokens
      per chunk.
    """
    flat = wanted.reshape(-1)
    chunk = min(chunk, len(flat))
    count = flat.sum(dtype=jnp.int32)
    before = jnp.cumsum(flat, dtype=jnp.int32)
    place = jnp.where(flat, before - 1, count + jnp.arange(len(flat)) - before)
    order = (
        jnp.zeros(len(flat), jnp.int32)
        .at[place]
        .set(jnp.arange(len(flat), dtype=jnp.int32), unique_indices=True)
    )
    order = jnp.pad(order, (0, -len(flat) % chunk), mode="edge")
    return order, place.reshape(wanted.shape), count, chunk


def part_of(x: Array, number: Array, chunk: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(x, number * chunk, chunk)


def put_part(x: Array, part: Array, number: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, number * len(part), 0)
