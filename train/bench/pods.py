"""Recipes compiled for TPU pods: what the tables of docs/pods.md are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from train.compile_only import CompiledStep, compile_step
from train.recipe.config import TrainConfig, load_config
from wedlm_jax.aot.topology import parse_topology
from wedlm_jax.benchmark import Bar
from wedlm_jax.errors import InputError

TOKENS = 512 * 4096
"""Of a step for each slice."""
RECIPES = ("configs/wedlm_8b.yaml", "configs/wedlm_7b.yaml")
TOPOLOGIES = (
    "v5p:4x4x4",
    "v5e:16x16",
    "v6e:16x16",
    "v5p:4x4x8",
    "v5p:8x8x8",
    "v5p:8x8x8*2",
)


@dataclasses.dataclass(frozen=True)
class PodStep:
    """Holds what one recipe costs on a pod.

    Attributes:
      recipe, topology, row_length, rows, accumulation: what was compiled, micro-batches as
        ``loss.remat: auto`` cut them.
      step: what the compiler and the chip's figures say of it; None where it does not compile.
      error: why it does not.
    """

    recipe: str
    topology: str
    row_length: int
    rows: int
    accumulation: int
    step: CompiledStep | None
    error: str | None = None


def compare_pods(
    recipes: Sequence[str],
    topologies: Sequence[str],
    lengths: Sequence[int],
    *,
    tensor: int = 1,
    sequence: int = 1,
    bar: Bar,
) -> Iterator[PodStep]:
    """Compiles every recipe for every topology at every row length, the tokens of a step being
    those of `TOKENS`; ``fsdp`` cuts the model within a slice, ``data`` goes over slices.

    Args:
      tensor, sequence: sizes of these axes of the mesh: chips that share a row.

    Raises:
      InputError: a malformed recipe or topology, before anything is compiled.
    """
    shared = {"mesh.tensor": tensor, "mesh.sequence": sequence}
    cells = [
        (recipe, topology, _config(recipe, topology, length, shared))
        for recipe in recipes
        for topology in topologies
        for length in lengths
    ]
    bar.expect(len(cells))
    for recipe, topology, config in cells:
        name = Path(recipe).stem
        bar.begin(f"{name} · {topology} · L = {config.row_length:,}")
        step = error = None
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
