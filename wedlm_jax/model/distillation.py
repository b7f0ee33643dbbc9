"""Computes the distance of a student's predictions from a teacher's through one output projection,
a chunk of rows at a time.

As in `wedlm_jax.model.cross_entropy`, but the matrix is not trained and each row has its own loss,
so that the caller may weight rows by these results: the backward pass only scales gradients of
hidden states that have been computed already.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.model.cross_entropy import TOKENS, in_chunks, product_in_float32
from wedlm_jax.model.quantization import product
from wedlm_jax.sharding import constrain, on_own_tokens

DISTANCES = ("tv", "kl", "ce")
"""Total variation, Kullback-Leibler divergence, and cross entropy with the token of the text."""


class Distances(NamedTuple):
    """A comparison of predictions by row, ``[R, N]`` each; 0 and False where there is no target.

    Attributes:
      loss: float32, the distance; the only one with a gradient.
      overlap: float32, Σ_v min(p, q) = 1 - TV of teacher p and student q.
      hit: bool, whether the student's likeliest token is the teacher's.
    """

    loss: Array
    overlap: Array
    hit: Array


def distances(
    student: Array,
    teacher: Array,
    head: Array,
    targets: Array,
    has_target: Array,
    *,
    distance: str,
    chunk: int,
) -> Distances:
    """Compares predictions row by row.

    Args:
      student, teacher: hidden states ``[R, N, D]``; the gradient flows into the student's alone.
      head: ``[V, D]``.
      targets: int32 ``[R, N]``, tokens of the text, for "ce".
      has_target: bool ``[R, N]``, the rows that are compared.
      distance: one of `DISTANCES`.
      chunk: how many rows' logits a device has in memory at once.
    """
    frozen = (jax.lax.stop_gradient(x) for x in (teacher, head.astype(student.dtype)))
    return Distances(*_distances(student, *frozen, targets, has_target, distance, chunk))


@partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _distances(*arguments: Any) -> tuple[Array, Array, Array]:
    return _forward(*arguments)[0]


def _forward(*arguments: Any) -> tuple[tuple[Array, Array, Array], Array]:
    *arrays, distance, chunk = arguments
    rows = (*TOKENS, None)
    local = on_own_tokens(
        partial(_in_chunks, distance=distance, chunk=chunk),
        [rows, rows, (None, None), TOKENS, TOKENS],
        [TOKENS, TOKENS, TOKENS, rows],
    )
    *results, d_student = local(*arrays)
    return tuple(results), d_student


def _backward(_: str, __: int, d_student: Array, cotangents: Any) -> tuple[Array | None, ...]:
    scaled = cotangents[0][..., None] * d_student.astype(jnp.float32)
    return scaled.astype(d_student.dtype), None, None, None, None


_distances.defvjp(_forward, _backward)


def _in_chunks(
    student: Array,
    teacher: Array,
    head: Array,
    targets: Array,
    has_target: Array,
    *,
    distance: str,
    chunk: int,
) -> tuple[Array, Array, Array, Array]:
    width = student.shape[-1]
    students, teachers = student.reshape(-1, width), teacher.reshape(-1, width)
    target = targets.reshape(-1)

    def of_chunk(at: Array, _: Array, __: None) -> tuple[tuple[Array, ...], None]:
        *values, slope = _of_chunk(students[at], teachers[at], head, target[at], distance)
        d_states = product_in_float32(slope.astype(head.dtype), head)
        return (*values, d_states.astype(student.dtype)), None

    rows: tuple[Array, Array, Array, Array] = in_chunks(of_chunk, None, has_target, chunk)[0]
    return rows


def _of_chunk(
    student: Array, teacher: Array, head: Array, target: Array, distance: str
) -> tuple[Array, Array, Array, Array]:
    """Returns loss, overlap and hit ``[C]``, and the gradient of each loss by the student's logits,
    float32 ``[C, V]``."""
    logits, logits_p = (
        constrain(product(x, head, jnp.float32), None, "vocab") for x in (student, teacher)
    )
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(logits_p)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    overlap = jnp.minimum(p, q).sum(-1)
    hit = logits.argmax(-1) == logits_p.argmax(-1)
    if distance == "kl":
        return (p * (log_p - log_q)).sum(-1), overlap, hit, q - p
    if distance == "ce":
        # A masked sum instead of a gather, which on a mesh would collect all logits.
        here = jnp.arange(logits.shape[-1]) == target[:, None]
        return -jnp.where(here, log_q, 0.0).sum(-1), overlap, hit, q - here
    # d(½ Σ |p - q|) / dq = ½ sign(q - p), through the softmax.
    sign = 0.5 * jnp.sign(q - p)
    return 1.0 - overlap, overlap, hit, q * (sign - (q * sign).sum(-1, keepdims=True))
