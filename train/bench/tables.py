"""What was measured, as tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich import box
from rich.table import Table

from train.bench.attention import AttentionCost
from train.bench.input import NEEDED, InputSpeed
from train.bench.pods import PodStep
from train.bench.step import StepCost

GIB = 2**30


def step_table(costs: Sequence[StepCost]) -> Table:
    """Tabulates steps of one row length, beside the first of them."""
    first = costs[0]
    table = _table(
        f"forward and backward, {first.rows} × {first.length:,} tokens, {first.flops / 1e9:,.0f} "
        "GFLOP",
        "ms",
        "×",
        "GFLOP/s",
        "loss",
    )
    for cost in costs:
        table.add_row(
            cost.way,
            f"{cost.median:,.1f}",
            f"{cost.median / first.median:.2f}",
            f"{cost.flops / cost.median / 1e6:,.1f}",
            f"{cost.loss:.6f}",
        )
    return table


def attention_table(costs: Sequence[AttentionCost], what: str) -> Table:
    """Tabulates backends at one row length."""
    table = _table(f"L = {costs[0].length:,}, {what}", "GFLOP", "memory, MiB", "ms")
    for cost in costs:
        table.add_row(
            cost.way,
            "" if cost.flops is None else f"{cost.flops / 1e9:,.1f}",
            f"{cost.temporary_bytes / 2**20:,.0f}",
            "" if cost.median is None else f"{cost.median:,.1f}",
        )
    return table


def input_table(speeds: Sequence[InputSpeed]) -> Table:
    """Tabulates ways to read, against what a pod asks of a host."""
    first = speeds[0]
    table = _table(
        f"rows of {first.row_length:,}, {first.row_bytes:,.0f} bytes each on disk",
        "rows/s",
        "M tokens/s",
        f"× {NEEDED:.1f} rows/s",
        "ms of this process a row",
    )
    table.caption = f"{NEEDED:.1f} rows/s: a host of a v5p 4x4x4 that trains the 8B recipe"
    cpu = [sorted(speed.cpu_milliseconds)[len(speed.cpu_milliseconds) // 2] for speed in speeds]
    for speed, milliseconds in zip(speeds, cpu, strict=True):
        table.add_row(
            f"{speed.workers} workers" if speed.workers else "threads",
            f"{speed.rows:,.0f}",
            f"{speed.rows * speed.row_length / 1e6:,.1f}",
            f"{speed.rows / NEEDED:,.0f}",
            f"{milliseconds:.2f}",
        )
    return table


POD_HEADS = (
    "recipe",
    "topology",
    "mesh",
    "L",
    "rows × accumulation",
    "computed anew",
    "peak of HBM",
    "to spare",
    "compute",
    "memory",
    "network",
    "slices",
    "step",
    "tokens/s",
    "MFU bound",
    "expected",
    "compiled in",
)


def pod_table(pods: Sequence[PodStep]) -> str:
    """Writes compiled steps as a Markdown table."""
    rows = [POD_HEADS, ("---",) * len(POD_HEADS), *map(_pod_cells, pods)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _pod_cells(pod: PodStep) -> tuple[str, ...]:
    step, sizes = pod.step, (f"{pod.row_length:,}", f"{pod.rows} × {pod.accumulation}")
    if step is None:
        return (pod.recipe, pod.topology, "", *sizes, pod.error or "")
    bound = step.roofline
    return (
        pod.recipe,
        pod.topology,
        " × ".join(f"{axis} {size}" for axis, size in step.mesh.items() if size > 1),
        *sizes,
        step.remat,
        f"{step.peak_bytes / GIB:.1f} of {step.hbm_limit / GIB:.0f} GiB",
        f"{step.headroom:.0%}",
        *(f"{seconds:.2f} s" for seconds in dataclasses.astuple(bound)),
        f"{bound.seconds:.2f} s ({bound.bound})",
        f"{step.tokens / bound.seconds:,.0f}",
        f"{step.mfu_bound:.0%}",
        f"{step.expected:.2f} s",
        f"{step.compile_seconds:.0f} s",
    )


def _table(title: str, *heads: str) -> Table:
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table
