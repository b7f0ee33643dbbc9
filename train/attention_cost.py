"""What each form of dual-stream attention costs, forward and backward, as rows grow.

    python -m train.attention_cost [--lengths 2048 4096 ...] [--time-up-to 2048]

On a GPU, in the shape of the 8B model:

    python -m train.attention_cost --forms blockwise --time-up-to 16384 --heads 32 \\
        --kv-heads 8 --head-dim 128 --dtype bfloat16 --repeats 20

Products are counted in the compiled program, loops as often as they run, and not told where a
kernel hides them; memory is what the compiler sets aside beside arguments and results. Times are
by turns in one run.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.aot.hlo_cost import program_cost
from wedlm_jax.attention import IMPLEMENTATIONS, attend
from wedlm_jax.masks import DualStreamMask

BLOCK_SIZE = 32
KERNELS = ("tpu_custom_call", "$xla.gpu.triton", "__cublas")
"""Calls whose products the compiled program does not show."""


@dataclasses.dataclass(frozen=True)
class Heads:
    """What one row is attended with; dtype is that of queries, keys and values."""

    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    dtype: str = "float32"


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """One form at one length; one row of tokens.

    Attributes:
      implementation, length: the form, and L of a row; both streams have 2 L.
      flops: of matrix products, forward and backward; None where a kernel hides them.
      temporary_bytes: beside arguments and results.
      seconds: median wall-clock, None where it was not run.
    """

    implementation: str
    length: int
    flops: int | None
    temporary_bytes: int
    seconds: float | None = None


def measure(
    implementations: Sequence[str],
    lengths: Sequence[int],
    *,
    time_up_to: int,
    repeats: int,
    heads: Heads,
) -> list[AttentionCost]:
    """Costs of every form at every length; forms take turns at being timed."""
    costs = []
    for length in lengths:
        programs = {name: _compile(name, length, heads) for name in implementations}
        arguments = _arguments(length, heads) if length <= time_up_to else None
        times = {} if arguments is None else _times(programs, arguments, repeats)
        for name, program in programs.items():
            memory = program.memory_analysis()
            assert memory is not None, "this backend does not count memory"
            text = program.as_text() or ""
            hidden = any(kernel in text for kernel in KERNELS)
            flops = None if hidden else program_cost(text).dot_flops
            temporary = memory.temp_size_in_bytes
            costs.append(AttentionCost(name, length, flops, temporary, times.get(name)))
    return costs


def _arguments(length: int, heads: Heads) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q_shape = (1, 2 * length, heads.heads, heads.head_dim)
    kv_shape = (1, heads.kv_heads, 2 * length, heads.head_dim)
    q, k, v = (
        jax.random.normal(key, shape).astype(heads.dtype)
        for key, shape in zip(keys, (q_shape, kv_shape, kv_shape), strict=True)
    )
    return q, k, v, jnp.ones((1, length), jnp.int32)


def _compile(implementation: str, length: int, heads: Heads) -> jax.stages.Compiled:
    def loss(q: Array, k: Array, v: Array, segments: Array) -> Array:
        mask = DualStreamMask(segments, BLOCK_SIZE)
        out = attend(q, k, v, mask, implementation=implementation)
        return (out.astype(jnp.float32) ** 2).sum()

    shapes = jax.eval_shape(partial(_arguments, length, heads))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()


def _times(
    programs: dict[str, jax.stages.Compiled], arguments: tuple[Array, ...], repeats: int
) -> dict[str, float]:
    seen: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(repeats + 1):
        for name, program in programs.items():
            seconds = _seconds(partial(program, *arguments))
            if turn:  # the first warms caches and allocators up
                seen[name].append(seconds)
    return {name: statistics.median(values) for name, values in seen.items()}


def _seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def table(costs: Sequence[AttentionCost]) -> str:
    """The costs as a Markdown table."""
    lines = ["| L | form | products, GFLOP | memory, MiB | seconds |", "|---|---|---|---|---|"]
    for cost in costs:
        seconds = "" if cost.seconds is None else f"{cost.seconds:.4f}"
        products = "" if cost.flops is None else f"{cost.flops / 1e9:.1f}"
        lines.append(
            f"| {cost.length:,} | {cost.implementation} | {products} | "
            f"{cost.temporary_bytes / 2**20:,.0f} | {seconds} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m train.attention_cost",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--lengths",
        type=int,
        nargs="+",
        default=[2048, 4096, 8192, 16384],
        metavar="L",
        help="rows to measure [2048 4096 8192 16384]",
    )
    add("--forms", nargs="+", default=["dense", "streams", "blockwise"], choices=IMPLEMENTATIONS)
    add("--time-up-to", type=int, default=2048, metavar="L", help="longest row to run [2048]")
    add("--repeats", type=int, default=3, metavar="N", help="timed turns [3]")
    add("--heads", type=int, default=8, metavar="H", help="query heads [8]")
    add("--kv-heads", type=int, default=2, metavar="K", help="key and value heads [2]")
    add("--head-dim", type=int, default=64, metavar="D", help="width of a head [64]")
    add("--dtype", default="float32", choices=["float32", "bfloat16"], help="[float32]")
    options = parser.parse_args()
    heads = Heads(options.heads, options.kv_heads, options.head_dim, options.dtype)
    print(
        f"one row, {heads.heads} heads of {heads.head_dim}, {heads.kv_heads} KV heads, "
        f"B = {BLOCK_SIZE}, {heads.dtype}, forward and backward\n"
    )
    costs = measure(
        options.forms,
        options.lengths,
        time_up_to=options.time_up_to,
        repeats=options.repeats,
        heads=heads,
    )
    print(table(costs))


if __name__ == "__main__":
    main()
