"""What each backend of dual-stream attention costs, forward and backward, as rows grow."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.aot.cost import program_cost
from wedlm_jax.attention import attend
from wedlm_jax.benchmark import Bar, by_turns
from wedlm_jax.masks import DualStreamMask

BLOCK_SIZE = 32
KERNELS = ("tpu_custom_call", "$xla.gpu.triton", "__cublas")
"""Calls whose products the compiled program does not show."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """Says what one row is attended with; dtype is that of queries, keys and values."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """Holds what one backend took at one length: one row of tokens, forward and backward.

    Attributes:
      way, length: the backend, and L of the row; both streams have 2 L.
      flops: of matrix products in the compiled program, loops as often as they run; None where a
        kernel hides them.
      temporary_bytes: that the compiler sets aside beside arguments and results.
      milliseconds: pass by pass; empty where it was not run.
    """

    way: str
    length: int
    flops: int | None
    temporary_bytes: int
    milliseconds: list[float]

    @property
    def median(self) -> float | None:
        return statistics.median(self.milliseconds) if self.milliseconds else None


def compare_attention(
    backends: Sequence[str],
    lengths: Sequence[int],
    *,
    time_up_to: int,
    passes: int,
    heads: Heads,
    bar: Bar,
) -> Iterator[list[AttentionCost]]:
    """Compiles every backend at every length, and times those that are short enough; yields the
    costs of a length at a time.

    Args:
      time_up_to: longest row that is run, and not only compiled.
    """
    for length in lengths:
        bar.expect(len(backends))
        programs = {}
        for name in backends:
            bar.begin(f"L = {length:,} · compiling {name}")
            programs[name] = _compile(name, length, heads)
        times: dict[str, list[float]] = {name: [] for name in backends}
        if length <= time_up_to:
            arguments = _arguments(length, heads)
            runs = {
                name: partial(_timed, partial(run, *arguments)) for name, run in programs.items()
            }
            made = by_turns(runs, passes, bar, f"L = {length:,}")
            times = {name: some[1:] for name, some in made.items()}
        yield [_cost(name, length, run, times[name]) for name, run in programs.items()]


def _cost(
    name: str, length: int, program: jax.stages.Compiled, times: list[float]
) -> AttentionCost:
    memory = program.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    text = program.as_text() or ""
    hidden = any(kernel in text for kernel in KERNELS)
    flops = None if hidden else program_cost(text).dot_flops
    return AttentionCost(name, length, flops, memory.temp_size_in_bytes, times)


def _arguments(length: int, heads: Heads) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q_shape = (1, 2 * length, heads.heads, heads.head_dim)
    kv_shape = (1, heads.kv_heads, 2 * length, heads.head_dim)
    q, k, v = (
        jax.random.normal(key, shape).astype(heads.dtype)
        for key, shape in zip(keys, (q_shape, kv_shape, kv_shape), strict=True)
    )
    return q, k, v, jnp.ones((1, length), jnp.int32)


def _compile(backend: str, length: int, heads: Heads) -> jax.stages.Compiled:
    def loss(q: Array, k: Array, v: Array, segments: Array) -> Array:
        mask = DualStreamMask(segments, BLOCK_SIZE)
        out = attend(q, k, v, mask, implementation=backend)
        return (out.astype(jnp.float32) ** 2).sum()

    shapes = jax.eval_shape(partial(_arguments, length, heads))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()


def _timed(call: Callable[[], object]) -> float:
    """Measures the milliseconds until the results are there."""
    started = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - started) * 1e3
