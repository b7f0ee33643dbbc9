"""`wedlm train --compile-only`: compiles the actual training step for TPUs without having any.

It reports on the program that the pod would run: its memory per chip as the compiler counts it, its
collectives, and the shortest time of a step that follows from these and the chip's figures.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from train.automatic import chosen, needed_by_sources, settled, with_prediction_blocks
from train.program import TrainProgram, make_program
from train.recipe.config import TrainConfig
from train.recipe.phases import Phase, largest_phase, phases_of, source_names
from train.resume import origin_of
from train.start import recipe_model
from train.step_cost import StepFlops, model_flops, program_flops, seen_pairs, visited_pairs
from wedlm_jax.aot.cost import ProgramCost, program_cost
from wedlm_jax.aot.topology import (
    ASSUMPTIONS,
    EXPECTED_ASSUMPTIONS,
    REACHED_BY_ATTENTION,
    REACHED_BY_PRODUCTS,
    CompiledProgram,
    Roofline,
    Topology,
    compile_for,
    compiler_options,
    describe_topology,
)
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import say
from wedlm_jax.loss import head_chunks
from wedlm_jax.sharding import local_bytes, make_mesh


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The compiler's report on one step.

    Attributes:
      tokens: tokens per step, L per row.
      computed_tokens: tokens per step that go through the layers, of both streams.
      state_bytes: bytes of parameters and moments on one device.
      peak_bytes: the compiler's peak of HBM on one device.
      hbm_limit: the chip's HBM.
      model_flops: FLOP of the whole step, without recomputation (`train.step_cost.model_flops`).
      device_flops: FLOP of one device, including recomputation in the backward pass.
      remat: the policy, chosen or given.
      rows, accumulation: rows per micro-batch and micro-batches per step, chosen or given.
      attention_share: by number of samples per row, the pairs of a query and a key that are
        visited, divided by those that are visible.
      cost: one device's HBM traffic and collectives.
      roofline: lower bounds of the step's time.
      mfu_bound: model_flops divided by what the chips could do in the step's shortest time.
      expected: seconds per step, under `EXPECTED_ASSUMPTIONS`.
      compile_seconds: how long compiling took on this machine.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    tokens: int
    computed_tokens: int
    state_bytes: int
    peak_bytes: int
    hbm_limit: int
    model_flops: float
    device_flops: StepFlops
    remat: str
    rows: int
    accumulation: int
    attention_share: dict[int, float]
    options: dict[str, str | bool]
    cost: ProgramCost
    roofline: Roofline
    mfu_bound: float
    expected: float
    compile_seconds: float

    @property
    def headroom(self) -> float:
        """The share of HBM that is left."""
        return 1 - self.peak_bytes / self.hbm_limit


def compile_phases(config: TrainConfig, topology_name: str) -> Iterator[tuple[Phase, CompiledStep]]:
    """Compiles the step for each batch size of a recipe's phases. As in a run, all have the policy
    of the largest one, and their micro-batches are cut in the same way. Raises as `compile_step`.

    Yields:
      the first phase of each batch size, and its step.
    """
    topology = describe_topology(topology_name)
    mesh = make_mesh(dataclasses.asdict(config.mesh), topology.devices)
    config = with_prediction_blocks(config, _needed_if_here, mesh.shape["sequence"])
    phases: dict[tuple[int, ...], Phase] = {}
    for phase in phases_of(config):
        phases.setdefault(phase.batch_shape, phase)
    largest, sources = largest_phase(config), len(source_names(config))
    compiled = compile_step(config, topology_name, sources)
    parts = compiled.accumulation // largest.config.accumulation
    for phase in phases.values():
        if phase.batch_shape == largest.batch_shape:
            yield phase, compiled
        else:
            adjusted = chosen(phase.config, compiled.remat, parts)
            yield phase, compile_step(adjusted, topology_name, sources)


def _needed_if_here(config: TrainConfig) -> int | None:
    """Returns `needed_by_sources`; None if the data, which compiling does not need, is not on this
    machine."""
    if not config.data.sources:
        return None
    try:
        return needed_by_sources(config)
    except InputError as error:
        if not config.prediction_blocks:
            say(f"prediction_blocks: all of a row, because {error}")
        return None


def compile_step(
    config: TrainConfig, topology_name: str, sources: int | None = None
) -> CompiledStep:
    """Lowers and compiles the step of a recipe's largest phase for a topology; ``sources`` as in
    `make_program`.

    Raises:
      InputError: an unknown topology, sizes that the mesh does not divide, or a program that
        does not fit into the chip's memory.
    """
    known = config.model.architecture or config.model.init_from
    origin = None if known else origin_of(config)
    model = recipe_model(config, run=origin.run if origin else None)
    topology = describe_topology(topology_name)
    mesh = make_mesh(dataclasses.asdict(config.mesh), topology.devices)
    options = compiler_options(topology.devices[0].device_kind)
    made: dict[tuple[str, int], tuple[TrainProgram, CompiledProgram]] = {}

    def compile_with(config: TrainConfig) -> tuple[TrainProgram, CompiledProgram]:
        key = config.loss.remat, config.accumulation
        if key not in made:
            program = make_program(largest_phase(config).config, model, mesh, sources)
            made[key] = program, compile_for(topology, mesh, program.lower, "step", options)
        return made[key]

    def peak_of(config: TrainConfig) -> int | None:
        try:
            return compile_with(config)[1].peak_bytes
        except InputError:
            return None  # it does not fit

    make_program(config, model, mesh)  # refuses what no policy would help
    program, compiled = compile_with(settled(config, model, mesh, topology.chip.hbm_bytes, peak_of))
    return _report(program, topology, compiled)


def _report(program: TrainProgram, topology: Topology, compiled: CompiledProgram) -> CompiledStep:
    config, model, mesh = program.config, program.model, program.mesh
    devices, slices, chip = topology.devices, topology.slices, topology.chip
    kind = devices[0].device_kind
    turns, _ = head_chunks(
        config.loss.chunk,
        (config.rows, config.row_length),
        config.prediction_length,
        config.block_size,
        batch=mesh.shape["data"] * mesh.shape["fsdp"],
        sequence=mesh.shape["sequence"],
    )
    cost = program_cost(
        compiled.text, devices=len(devices) // slices, slices=slices, unknown_trips=turns
    )
    rows = config.rows * config.accumulation
    whole = program_flops(config, model, rows, kind)
    flops = StepFlops(whole.products / len(devices), whole.attention / len(devices))
    bound = chip.bounds(
        flops=flops.total,
        hbm_bytes=cost.hbm_bytes,
        sent_bytes=cost.sent_bytes,
        slice_bytes=cost.slice_bytes,
    )
    shares = {n: visited_pairs(config, kind, n) / seen_pairs(config, n) for n in (1, 10)}
    computing = flops.products / REACHED_BY_PRODUCTS + flops.attention / REACHED_BY_ATTENTION
    needed = model_flops(config, model)
    return CompiledStep(
        topology=topology.name,
        devices=len(devices),
        mesh=dict(mesh.shape),
        parameters=model.num_parameters(),
        tokens=rows * config.row_length,
        computed_tokens=rows * config.row_tokens,
        state_bytes=local_bytes(program.state),
        peak_bytes=compiled.peak_bytes,
        hbm_limit=chip.hbm_bytes,
        model_flops=needed,
        device_flops=flops,
        remat=config.loss.remat,
        rows=config.rows,
        accumulation=config.accumulation,
        attention_share=shares,
        options=compiler_options(kind),
        cost=cost,
        roofline=bound,
        mfu_bound=needed / (len(devices) * chip.peak_flops * bound.seconds),
        expected=max(computing / chip.peak_flops, bound.seconds),
        compile_seconds=compiled.seconds,
    )


def describe(step: CompiledStep) -> str:
    """Returns the report as lines of text."""
    gib = 2**30
    axes = " x ".join(f"{axis} {size}" for axis, size in step.mesh.items() if size > 1)
    bound, cost = step.roofline, step.cost
    lines = [
        f"{step.topology}: {step.devices:,} chips as {axes or 'one'}; "
        f"compiled in {step.compile_seconds:.0f} s",
        f"parameters           {step.parameters / 1e9:.2f} B",
        f"tokens per step      {step.tokens:,}; {step.computed_tokens:,} of both streams",
        f"micro-batches        {step.accumulation}, of {step.rows:,} rows each",
        f"state per chip       {step.state_bytes / gib:.2f} GiB (parameters, moments)",
        f"peak HBM per chip    {step.peak_bytes / gib:.2f} of {step.hbm_limit / gib:.0f} GiB, "
        f"{step.headroom:.0%} to spare",
        f"products per step    {step.model_flops:.3g} FLOP (forward and backward, each once)",
        f"recomputed           as loss.remat: {step.remat} says",
        f"products per chip    {step.device_flops.total:.3g} FLOP, recomputation included; "
        f"attention {step.device_flops.attention / step.device_flops.total:.0%}",
        "attention computes   "
        + ", ".join(
            f"{share:.2f} times the visible pairs with {samples} "
            f"sample{'s' * (samples > 1)} per row"
            for samples, share in step.attention_share.items()
        ),
        f"HBM traffic per chip {cost.hbm_bytes / gib:.0f} GiB",
        f"sent by a chip       {cost.sent_bytes / gib:.2f} GiB to its slice, "
        f"{cost.slice_bytes / gib:.2f} GiB to others",
    ]
    lines += [
        f"  {kind:<19}{cost.collective_count[kind]:,} times, {size / gib:.2f} GiB per chip"
        for kind, size in sorted(cost.collective_bytes.items())
    ]
    lines += [
        f"shortest step        {bound.seconds:.3f} s, by {bound.bound}: compute "
        f"{bound.compute:.3f} s, memory {bound.memory:.3f} s, network {bound.network:.3f} s, "
        f"slices {bound.slices:.3f} s",
        f"at best              {step.tokens / bound.seconds:,.0f} tokens/s, "
        f"{step.mfu_bound:.0%} of the chips' peak in the model's products",
        f"expected             {step.expected:.3f} s, {step.tokens / step.expected:,.0f} tokens/s",
        f"at best assumes      {ASSUMPTIONS}",
        f"expected assumes     {EXPECTED_ASSUMPTIONS}",
        "XLA's flags          " + " ".join(f"{k}={v}" for k, v in step.options.items()),
    ]
    return "\n".join(lines)
