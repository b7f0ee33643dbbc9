"""Measures what each backend of dual-stream attention costs, forward and backward, as rows grow:
matrix products in the compiled program, memory besides arguments and results, and milliseconds."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from benchmarks.options import add_numbers, new_parser
from infer.bench.measure import Report, by_turns, milliseconds, status, table
from wedlm_jax.aot.cost import program_cost
from wedlm_jax.attention import IMPLEMENTATIONS, attend
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.masks import DualStreamMask

BLOCK_SIZE = 32
KERNELS = ("tpu_custom_call", "$xla.gpu.triton", "__cublas")
"""Calls whose products are not visible in the compiled program."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("attention", __doc__)
    add = parser.add_argument
    add_numbers(parser, "--lengths", [2048, 4096, 8192, 16384], "L of a row; both streams: 2 L")
    add_numbers(parser, "--time-up-to", 2048, "longest row to run and not just compile")
    add_numbers(parser, "--heads", 8, "query heads")
    add_numbers(parser, "--kv-heads", 2, "key and value heads")
    add_numbers(parser, "--head-dim", 64, "width of a head")
    dtypes = ("float32", "bfloat16")
    meaning = "type of queries, keys and values [float32]"
    add("--dtype", choices=dtypes, default="float32", help=meaning)
    backends = ["dense", "streams", "blockwise"]
    add(
        "--attention",
        nargs="+",
        choices=tuple(IMPLEMENTATIONS),
        default=backends,
        help=f"backends, one or more [{' '.join(backends)}]",
    )
    options = parser.parse_args(arguments)
    if options.heads % options.kv_heads:
        raise InputError("--heads: expected a multiple of --kv-heads")
    if wrong := [length for length in options.lengths if length % BLOCK_SIZE]:
        raise InputError(f"--lengths: expected multiples of {BLOCK_SIZE}, not {wrong[0]}")
    report = Report(options.output)
    for length in options.lengths:
        with status(f"L = {length:,} · compiling"):
            programs = {name: _compile(name, length, options) for name in options.attention}
        rows = [
            {"way": name, "length": length, **_cost(program)} for name, program in programs.items()
        ]
        if length <= options.time_up_to:
            given = _arguments(length, options)
            runs = {
                name: partial(milliseconds, partial(program, *given))
                for name, program in programs.items()
            }
            made = by_turns(runs, options.passes, f"L = {length:,}")
            rows = [row | {"ms": made[row["way"]][1:]} for row in rows]
        heads = f"{options.heads} heads of {options.head_dim}, {options.kv_heads} KV heads"
        report.add("attention", rows, table(f"{heads}, {options.dtype}", rows))
    return 0


def _cost(program: jax.stages.Compiled) -> dict[str, Any]:
    memory = program.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    text = program.as_text() or ""
    hidden = any(kernel in text for kernel in KERNELS)
    return {
        "GFLOP": None if hidden else program_cost(text).dot_flops / 1e9,
        "memory, MiB": memory.temp_size_in_bytes / 2**20,
        "ms": [],
    }


def _arguments(length: int, options: argparse.Namespace) -> tuple[Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    q_shape = (1, 2 * length, options.heads, options.head_dim)
    kv_shape = (1, options.kv_heads, 2 * length, options.head_dim)
    q, k, v = (
        jax.random.normal(key, shape).astype(options.dtype)
        for key, shape in zip(keys, (q_shape, kv_shape, kv_shape), strict=True)
    )
    return q, k, v, jnp.ones((1, length), jnp.int32)


def _compile(backend: str, length: int, options: argparse.Namespace) -> jax.stages.Compiled:
    def loss(q: Array, k: Array, v: Array, segments: Array) -> Array:
        mask = DualStreamMask(segments, BLOCK_SIZE)
        out = attend(q, k, v, mask, implementation=backend)
        return (out.astype(jnp.float32) ** 2).sum()

    shapes = jax.eval_shape(partial(_arguments, length, options))
    return jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes).compile()


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.attention", lambda: main(sys.argv[1:])))
