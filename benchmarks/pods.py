"""Compiles recipes for TPU pods, and reports the compiler's peak memory and a lower bound on the
time of a step. The tables of docs/compile-report.md come from this."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.options import add_numbers, new_parser
from infer.bench.measure import Report, status
from train.compile_only import CompiledStep, compile_step
from train.recipe.config import TrainConfig, load_config
from wedlm_jax.aot.topology import parse_topology
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command

TOKENS = 512 * 4096
"""Tokens of a step for each slice."""
RECIPES = ("configs/wedlm_8b.yaml", "configs/wedlm_7b.yaml")
TOPOLOGIES = ("v5p:4x4x4", "v5e:16x16", "v6e:16x16", "v5p:4x4x8", "v5p:8x8x8", "v5p:8x8x8*2")
GIB = 2**30


@dataclasses.dataclass(frozen=True)
class PodStep:
    """The cost of one recipe on a pod.

    Attributes:
      recipe, topology, row_length, rows, accumulation: what was compiled, with the micro-batches
        that ``loss.remat: auto`` chose.
      step: what the compiler and the chip's figures say about it; None if it does not compile.
      error: why it does not.
    """

    recipe: str
    topology: str
    row_length: int
    rows: int
    accumulation: int
    step: CompiledStep | None
    error: str | None = None

    def cells(self) -> dict[str, str]:
        """Returns the cells of a table row by column heading."""
        step = self.step
        cells = {
            "recipe": self.recipe,
            "topology": self.topology,
            "mesh": "",
            "L": f"{self.row_length:,}",
            "rows × accumulation": f"{self.rows} × {self.accumulation}",
            "recomputed": self.error or "",
        }
        if step is None:
            return cells
        bound = step.roofline
        sizes = [f"{axis} {size}" for axis, size in step.mesh.items() if size > 1]
        compute, memory, network, slices = dataclasses.astuple(bound)
        return cells | {
            "mesh": " × ".join(sizes),
            "recomputed": step.remat,
            "peak of HBM": f"{step.peak_bytes / GIB:.1f} of {step.hbm_limit / GIB:.0f} GiB",
            "to spare": f"{step.headroom:.0%}",
            "compute": f"{compute:.2f} s",
            "memory": f"{memory:.2f} s",
            "network": f"{network:.2f} s",
            "slices": f"{slices:.2f} s",
            "step": f"{bound.seconds:.2f} s ({bound.bound})",
            "tokens/s": f"{step.tokens / bound.seconds:,.0f}",
            "MFU bound": f"{step.mfu_bound:.0%}",
            "expected": f"{step.expected:.2f} s",
            "compiled in": f"{step.compile_seconds:.0f} s",
        }


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("pods", __doc__, passes=None)
    for flag, metavar, default in (
        ("--recipe", "FILE", RECIPES),
        ("--topology", "NAME", TOPOLOGIES),
    ):
        shown = f"one or more [{' '.join(default)}]"
        parser.add_argument(flag, nargs="+", metavar=metavar, default=default, help=shown)
    add_numbers(parser, "--lengths", [4096], "L of packed rows")
    for axis in ("tensor", "sequence"):
        add_numbers(parser, f"--{axis}", 1, f"mesh.{axis} of the recipes: chips that share a row")
    options = parser.parse_args(arguments)
    report, pods = Report(options.output), []
    shared = {"mesh.tensor": options.tensor, "mesh.sequence": options.sequence}
    for pod in compare_pods(options.recipe, options.topology, options.lengths, shared):
        pods.append(pod)
        report.add("pods", [pod])
    report.add("pods", [], pod_table(pods))
    return 0


def compare_pods(
    recipes: Sequence[str],
    topologies: Sequence[str],
    lengths: Sequence[int],
    shared: Mapping[str, int],
) -> Iterator[PodStep]:
    """Compiles every recipe for every topology and row length, with `TOKENS` tokens per step and
    slice; ``fsdp`` shards the model within a slice, ``data`` goes over slices.

    Args:
      shared: recipe fields that are the same for all.

    Raises:
      InputError: a malformed recipe or topology, before anything is compiled.
    """
    cells = [
        (recipe, topology, _config(recipe, topology, length, shared))
        for recipe in recipes
        for topology in topologies
        for length in lengths
    ]
    for recipe, topology, config in cells:
        name = Path(recipe).stem
        step = error = None
        with status(f"{name} · {topology} · L = {config.row_length:,}"):
            try:
                step = compile_step(config, topology)
            except InputError as refusal:
                error = str(refusal)
        cut = step or config
        yield PodStep(name, topology, config.row_length, cut.rows, cut.accumulation, step, error)


def _config(recipe: str, topology: str, length: int, shared: Mapping[str, int]) -> TrainConfig:
    slices = parse_topology(topology)[2]
    fields = {
        **shared,
        "row_length": length,
        "rows": slices * TOKENS // length,
        "accumulation": 1,
        "mesh.data": slices,
        "mesh.fsdp": -1,
    }
    return load_config(recipe, [f"{name}={value}" for name, value in fields.items()])


def pod_table(pods: Sequence[PodStep]) -> str:
    """Returns compiled steps as a Markdown table."""
    rows = [pod.cells() for pod in pods]
    heads = max(rows, key=len)
    lines = [heads, ["---"] * len(heads), *(row.values() for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.pods", lambda: main(sys.argv[1:])))
