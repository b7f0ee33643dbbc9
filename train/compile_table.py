"""`python -m train.compile_table --output FILE`: the tables of docs/pods.md.

Each cell is a recipe compiled for a topology. What is done is kept in FILE, a line of JSON a
cell, so that a run that was stopped goes on; the tables are printed from what is there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from train.compile_only import CompiledStep, compile_step
from train.config import load_config
from wedlm_jax.aot.roofline import Roofline
from wedlm_jax.errors import InputError

TOKENS = 512 * 4096
"""A step's, in all cells but those of two slices, which take twice as many."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """What to compile: a recipe of configs/, a topology, and how the batch is cut.

    Attributes:
      recipe: its name, without a suffix.
      topology: as in `wedlm_jax.aot.topology`.
      row_length: L.
      accumulation: micro-batches in a step.
      data: replicas; the other chips are ``fsdp``.
      tokens: of a step.
    """

    recipe: str
    topology: str
    row_length: int = 4096
    accumulation: int = 1
    data: int = 1
    tokens: int = TOKENS

    @property
    def overrides(self) -> list[str]:
        rows = self.tokens // self.row_length // self.accumulation
        sizes = {"row_length": self.row_length, "rows": rows, "accumulation": self.accumulation}
        mesh = {"mesh.data": self.data, "mesh.fsdp": -1}
        return [f"{name}={value}" for name, value in {**sizes, **mesh}.items()]


def _pods(recipe: str) -> list[Cell]:
    return [
        Cell(recipe, "v5p:4x4x4"),
        Cell(recipe, "v5e:16x16"),
        Cell(recipe, "v6e:16x16"),
        Cell(recipe, "v5p:4x4x8"),
        Cell(recipe, "v5p:8x8x8"),
        Cell(recipe, "v5p:8x8x8*2", data=2, tokens=2 * TOKENS),
    ]


PODS = [*_pods("wedlm_8b"), *_pods("wedlm_7b")]
LENGTHS = [Cell("wedlm_8b", "v5p:4x4x4", length) for length in (2048, 4096, 8192, 16384, 32768)]
CELLS = [*PODS, *(cell for cell in LENGTHS if cell not in PODS)]

Results = dict[Cell, dict[str, Any]]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.compile_table", description=__doc__)
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("--configs", type=Path, default=Path("configs"), metavar="DIR")
    parser.add_argument("--print-only", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    results = read(options.output)
    for cell in [] if options.print_only else CELLS:
        if cell in results:
            continue
        print(f"compiling {cell}", file=sys.stderr, flush=True)
        results[cell] = run(cell, options.configs)
        append(options.output, cell, results[cell])
    print(tables(results))
    return 0


def run(cell: Cell, configs: Path) -> dict[str, Any]:
    """The compiled step's figures, or the reason why there are none as ``{"error": ...}``."""
    try:
        config = load_config(configs / f"{cell.recipe}.yaml", cell.overrides)
        return dataclasses.asdict(compile_step(config, cell.topology))
    except InputError as error:
        return {"error": str(error)}


def read(path: Path) -> Results:
    """The finished cells of a file; a last line that was cut short is not one."""
    results: Results = {}
    if not path.exists():
        return results
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        results[Cell(**row.pop("cell"))] = row
    return results


def append(path: Path, cell: Cell, figures: dict[str, Any]) -> None:
    """Adds a line, behind a line's end even where the last one was cut short."""
    line = json.dumps({"cell": dataclasses.asdict(cell), **figures}) + "\n"
    with path.open("a+", encoding="utf-8") as file:
        file.seek(0)
        whole = file.read()
        file.write(line if whole.endswith("\n") or not whole else "\n" + line)


def tables(results: Results) -> str:
    """Both tables in Markdown."""
    head = (
        "peak of HBM",
        "to spare",
        "compute",
        "memory",
        "network",
        "slices",
        "step",
        "tokens/s",
        "MFU bound",
        "compiled in",
    )
    pods = _table(("recipe", "topology", "mesh", "rows × accumulation", *head), PODS, results, _pod)
    lengths = _table(("L", "rows", *head), LENGTHS, results, _length)
    return f"{pods}\n\n{lengths}"


def _table(head: Sequence[str], cells: list[Cell], results: Results, name: Any) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for cell in cells:
        if cell not in results:
            continue
        figures = results[cell]
        columns = [*name(cell, figures), *_figures(figures)]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _pod(cell: Cell, figures: dict[str, Any]) -> list[str]:
    rows = cell.tokens // cell.row_length // cell.accumulation
    mesh = figures.get("mesh", {})
    axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items() if size > 1)
    return [cell.recipe, cell.topology, axes, f"{rows} × {cell.accumulation}"]


def _length(cell: Cell, figures: dict[str, Any]) -> list[str]:
    return [f"{cell.row_length:,}", str(cell.tokens // cell.row_length)]


def _figures(figures: dict[str, Any]) -> list[str]:
    if "error" in figures:
        return [figures["error"]]
    step = CompiledStep(**{**figures, "roofline": Roofline(**figures["roofline"])})
    bound, gib = step.roofline, 2**30
    return [
        f"{step.peak_bytes / gib:.1f} of {step.hbm_limit / gib:.0f} GiB",
        f"{step.headroom:.0%}",
        *(f"{seconds:.2f} s" for seconds in dataclasses.astuple(bound)),
        f"{bound.seconds:.2f} s ({bound.bound})",
        f"{step.tokens / bound.seconds:,.0f}",
        f"{step.mfu_bound:.0%}",
        f"{step.compile_seconds:.0f} s",
    ]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
