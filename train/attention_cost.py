"""What each form of dual-stream attention costs, forward and backward, as rows grow.

    python -m train.attention_cost [--lengths 2048 4096 ...] [--time-up-to 2048]

Products are counted in the compiled program, loops as often as they run; memory is what the
compiler sets aside beside arguments and results. Times are by turns in one run.
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

from wedlm_jax.attention import IMPLEMENTATIONS, attend
from wedlm_jax.hlo_cost import program_cost
from wedlm_jax.masks import DualStreamMask

BLOCK_SIZE = 32
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """One form at one length; one row of tokens.

    Attributes:
      implementation, length: the form, and L of a row; both streams have 2 L.
      flops: of matrix products, forward and backward.
      temporary_bytes: beside arguments and results.
      seconds: median wall-clock, None where it was not run.
    """

    implementation: str
    length: int
    flops: int
    temporary_bytes: int
    seconds: float | None = None


def measure(
    implementations: Sequence[str], lengths: Sequence[int], *, time_up_to: int, repeats: int
) -> list[AttentionCost]:
    """Costs of every form at every length; forms take turns at being timed."""
    costs = []
    for length in lengths:
        programs = {name: _compile(name, length) for name in implementations}
        times = _times(programs, length, repeats) if length <= time_up_to else {}
        for name, program in programs.items():
            memory = program.memory_analysis()
            assert memory is not None, "this backend does not count memory"
            flops = program_cost(program.as_text() or "").dot_flops
            temporary = memory.temp_size_in_bytes
            costs.append(AttentionCost(name, length, flops, temporary, times.get(name)))
    return costs


def _arguments(length: int) -> tuple[Array, Array, Array, Array]:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (1, 2 * length, HEADS, HEAD_DIM))
    k, v = (jax.random.normal(key, (1, KV_HEADS, 2 * length, HEAD_DIM)) for key in keys[1:])
    return q, k, v, jnp.ones((1, length), jnp.int32)


def _compile(implementation: str, length: int) -> jax.stages.Compiled:
    def loss(q: Array, k: Array, v: Array, segments: Array) -> Array:
        mask = DualStreamMask(segments, BLOCK_SIZE)
        return (attend(q, k, v, mask, implementation=implementation) ** 2).sum()

    shapes = jax.eval_shape(partial(_arguments, length))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()


def _times(programs: dict[str, jax.stages.Compiled], length: int, repeats: int) -> dict[str, float]:
    arguments = _arguments(length)
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
        seconds = "" if cost.seconds is None else f"{cost.seconds:.3f}"
        lines.append(
            f"| {cost.length:,} | {cost.implementation} | {cost.flops / 1e9:.1f} | "
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
    add("--lengths", type=int, nargs="+", default=[2048, 4096, 8192, 16384], metavar="L",
        help="rows to measure [2048 4096 8192 16384]")  # fmt: skip
    add("--forms", nargs="+", default=["dense", "streams", "blockwise"], choices=IMPLEMENTATIONS)
    add("--time-up-to", type=int, default=2048, metavar="L", help="longest row to run [2048]")
    add("--repeats", type=int, default=3, metavar="N", help="timed turns [3]")
    options = parser.parse_args()
    print(
        f"one row, {HEADS} heads of {HEAD_DIM}, {KV_HEADS} KV heads, B = {BLOCK_SIZE}, float32, "
        "forward and backward\n"
    )
    costs = measure(options.forms, options.lengths, time_up_to=options.time_up_to,
                    repeats=options.repeats)  # fmt: skip
    print(table(costs))


if __name__ == "__main__":
    main()
