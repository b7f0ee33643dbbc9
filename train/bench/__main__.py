"""`python -m train.bench`: the command. What is compared is in a file each beside this one."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from wedlm_jax.attention import IMPLEMENTATIONS
from wedlm_jax.benchmark import Bar, BenchmarkParser, Outcome, report
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command

PROG = "python -m train.bench"
COMPARISONS = {
    "step": "milliseconds of forward and backward pass over both streams (D = 512, 8 layers)\n"
    "against the same step in PyTorch, once both agree on loss and gradients",
    "prompts": "milliseconds of the step on conversations, with their prompts in the prediction\n"
    "stream and without, once all agree on loss and gradients",
    "attention": "products, memory and milliseconds of each backend of dual-stream attention,\n"
    "forward and backward, as rows grow",
    "input": "packed rows a second, read in shuffled order and placed on a device, by\n"
    "threads and by worker processes",
    "pods": "recipes compiled for TPU pods: the compiler's peak of memory, and the\n"
    "shortest time that a step can take",
}
EXAMPLES = (
    f"{PROG} --compare step --lengths 512 1024 --passes 9 --output step.json",
    f"{PROG} --compare attention --passes 5",
    f"{PROG} --compare attention --attention blockwise --time-up-to 16384 --heads 32 "
    "--kv-heads 8 --head-dim 128 --dtype bfloat16",
    f"{PROG} --compare input --data DATA --workers 0 4",
    f"{PROG} --compare pods --recipe configs/wedlm_8b.yaml --topology v5p:4x4x4 "
    "--lengths 4096 32768",
)
LENGTHS = {
    "step": [512, 1024],
    "prompts": [1024],
    "attention": [2048, 4096, 8192, 16384],
    "input": [4096],
    "pods": [4096],
}
BACKENDS = {
    "step": ["streams", "blockwise"],
    "prompts": ["streams", "blockwise"],
    "attention": ["dense", "streams", "blockwise"],
}
RIVALS = ("torch", "torch-compiled")
BLOCK_SIZE = 32
ROWS = {"step": 1, "prompts": 1, "input": 32}
PASSES, BATCHES, TIME_UP_TO = 3, 100, 2048
PROMPT_SHARE = 0.5


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    options.compare = options.compare or ["step"]
    parser.check(options)
    _check(options)
    return report(lambda bar: _compare(options, bar), options.output)


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser(
        PROG,
        COMPARISONS,
        default="step",
        closing="Everything that is timed runs once untimed, which compiles; figures are medians "
        "over the\npasses.",
        examples=EXAMPLES,
    )
    add = parser.add
    lengths = (
        "L of packed rows, one or more [step 512 1024, prompts 1024, attention 2048 4096 8192 "
        "16384, "
    )
    add("--lengths", f"{lengths}input and pods 4096]", type=int, nargs="+", metavar="L")
    add(
        "--rows",
        "packed rows of a batch [step and prompts 1, input 32]",
        of=("step", "prompts", "input"),
        type=int,
        metavar="N",
    )
    add(
        "--rival",
        "PyTorch as it is and by torch.compile, or nothing: ours alone [torch torch-compiled]",
        of=("step",),
        nargs="*",
        choices=RIVALS,
    )
    add(
        "--attention",
        "backends, one or more [step and prompts streams blockwise, attention dense streams "
        "blockwise]",
        of=("step", "prompts", "attention"),
        nargs="+",
        choices=tuple(IMPLEMENTATIONS),
    )
    steps = ("step", "prompts")
    add("--unroll", "layers in a turn of the scan [8: all]", of=steps, type=int, metavar="N")
    add(
        "--prompt-share",
        f"of a conversation's blocks that are its prompt [{PROMPT_SHARE}]",
        of=("prompts",),
        type=float,
        metavar="X",
    )
    own = ("attention",)
    add("--time-up-to", f"longest row to run [{TIME_UP_TO}]", of=own, type=int, metavar="L")
    add("--heads", "query heads [8]", of=own, type=int, metavar="H")
    add("--kv-heads", "key and value heads [2]", of=own, type=int, metavar="K")
    add("--head-dim", "width of a head [64]", of=own, type=int, metavar="D")
    add("--dtype", "[float32]", of=own, choices=("float32", "bfloat16"))
    add("--data", "folder of `wedlm tokenize` [random rows]", of=("input",), metavar="DIR")
    add("--workers", "processes, 0: threads [0 2]", of=("input",), type=int, nargs="+", metavar="N")
    add("--batches", f"timed in a pass [{BATCHES}]", of=("input",), type=int, metavar="N")
    add(
        "--recipe",
        "one or more [configs/wedlm_8b.yaml configs/wedlm_7b.yaml]",
        of=("pods",),
        nargs="+",
        metavar="FILE",
    )
    add(
        "--topology",
        "one or more [v5p:4x4x4 v5e:16x16 v6e:16x16 v5p:4x4x8 v5p:8x8x8 v5p:8x8x8*2]",
        of=("pods",),
        nargs="+",
        metavar="NAME",
    )
    for axis in ("tensor", "sequence"):
        add(f"--{axis}", f"as mesh.{axis} of a recipe [1]", of=("pods",), type=int, metavar="N")
    add(
        "--passes",
        f"timed passes [{PASSES}]",
        of=("step", "prompts", "attention", "input"),
        type=int,
        metavar="N",
    )
    return parser


def _check(options: argparse.Namespace) -> None:
    sizes = ("rows", "unroll", "time_up_to", "heads", "kv_heads", "head_dim", "tensor", "sequence")
    for name in (*sizes, "batches", "passes"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise InputError(f"--{name.replace('_', '-')}: expected at least 1")
    if not 0 < (options.prompt_share or PROMPT_SHARE) < 1:
        raise InputError("--prompt-share: expected a number between 0 and 1")
    if min(options.workers or [0]) < 0:
        raise InputError("--workers: expected at least 0")
    if (options.heads or 8) % (options.kv_heads or 2):
        raise InputError("--heads: expected a multiple of --kv-heads")
    if options.data is not None and options.lengths is not None:
        raise InputError("--data and --lengths: the rows in a folder have their length")
    if wrong := [length for length in options.lengths or () if length < 1 or length % BLOCK_SIZE]:
        raise InputError(f"--lengths: expected multiples of {BLOCK_SIZE}, not {wrong[0]}")
    if "step" in options.compare and _rivals(options):
        from train.bench.rival import check_torch

        check_torch()


def _rivals(options: argparse.Namespace) -> Sequence[str]:
    return RIVALS if options.rival is None else options.rival


def _compare(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    compare = {
        "step": _step,
        "prompts": _prompts,
        "attention": _attention,
        "input": _input,
        "pods": _pods,
    }
    for name in options.compare:
        yield from compare[name](options, bar)


def _step(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    from train.bench.step import SHAPE, StepsDiffer, compare_step
    from train.bench.tables import step_table

    try:
        for costs in compare_step(
            options.lengths or LENGTHS["step"],
            rows=options.rows or ROWS["step"],
            backends=options.attention or BACKENDS["step"],
            rivals=_rivals(options),
            unroll=options.unroll or SHAPE.num_hidden_layers,
            passes=options.passes or PASSES,
            bar=bar,
        ):
            yield Outcome("step", costs, step_table(costs))
    except StepsDiffer as differ:
        yield Outcome("step", [], failure=f"{PROG}: {differ}; nothing was timed")


def _prompts(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    from train.bench.prompts import compare_prompts
    from train.bench.step import SHAPE, StepsDiffer
    from train.bench.tables import step_table

    try:
        for costs in compare_prompts(
            options.lengths or LENGTHS["prompts"],
            rows=options.rows or ROWS["prompts"],
            share=options.prompt_share or PROMPT_SHARE,
            backends=options.attention or BACKENDS["prompts"],
            unroll=options.unroll or SHAPE.num_hidden_layers,
            passes=options.passes or PASSES,
            bar=bar,
        ):
            yield Outcome("prompts", costs, step_table(costs))
    except StepsDiffer as differ:
        yield Outcome("prompts", [], failure=f"{PROG}: {differ}; nothing was timed")


def _attention(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    from train.bench.attention import Heads, compare_attention
    from train.bench.tables import attention_table

    heads = Heads(
        options.heads or 8,
        options.kv_heads or 2,
        options.head_dim or 64,
        options.dtype or "float32",
    )
    what = f"{heads.heads} heads of {heads.head_dim}, {heads.kv_heads} KV heads, {heads.dtype}"
    for costs in compare_attention(
        options.attention or BACKENDS["attention"],
        options.lengths or LENGTHS["attention"],
        time_up_to=options.time_up_to or TIME_UP_TO,
        passes=options.passes or PASSES,
        heads=heads,
        bar=bar,
    ):
        yield Outcome("attention", costs, attention_table(costs, what))


def _input(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    from train.bench.input import compare_input, open_rows, random_rows
    from train.bench.tables import input_table

    rows = options.rows or ROWS["input"]
    for length in options.lengths or LENGTHS["input"]:
        with tempfile.TemporaryDirectory(prefix="wedlm-bench-") as temporary:
            if options.data is not None:
                data = open_rows(Path(options.data))
            else:
                data = random_rows(Path(temporary), rows, length)
            speeds = compare_input(
                data,
                options.workers or [0, 2],
                rows=rows,
                batches=options.batches or BATCHES,
                passes=options.passes or PASSES,
                bar=bar,
            )
        yield Outcome("input", speeds, input_table(speeds))


def _pods(options: argparse.Namespace, bar: Bar) -> Iterator[Outcome]:
    from train.bench.pods import RECIPES, TOPOLOGIES, compare_pods
    from train.bench.tables import pod_table

    pods = []
    for pod in compare_pods(
        options.recipe or RECIPES,
        options.topology or TOPOLOGIES,
        options.lengths or LENGTHS["pods"],
        tensor=options.tensor or 1,
        sequence=options.sequence or 1,
        bar=bar,
    ):
        pods.append(pod)
        yield Outcome("pods", [pod])
    yield Outcome("pods", [], pod_table(pods))


if __name__ == "__main__":
    sys.exit(run_command(PROG, lambda: main(sys.argv[1:])))
