"""`wedlm generate --compile-only`: the decoder, compiled for TPUs that are not here.

Both programs of a batch, prefill and decode loop, as the engine runs them: weights, heads and
cache over ``tensor``, rows over ``data``. From the program and the chip's figures comes the
shortest time of a forward, and so the most tokens a second.
"""

from __future__ import annotations

import dataclasses
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from omegaconf import OmegaConf

from wedlm_jax.attention import check_runs_on, window_implementation
from wedlm_jax.batch import PREFILL_TOKENS
from wedlm_jax.batch_sizes import (
    LONGEST_PIECE,
    SMALLEST_OUTPUT_BUCKET,
    SMALLEST_PROMPT_BUCKET,
    cache_bucket,
)
from wedlm_jax.buckets import bucket
from wedlm_jax.config import ModelConfig, config_from_hf, read_config_json
from wedlm_jax.decode_state import DecodeState, num_slots
from wedlm_jax.decoding import REFILLS, forward_shapes
from wedlm_jax.errors import InputError
from wedlm_jax.hlo_cost import ProgramCost, program_cost
from wedlm_jax.model import Transformer
from wedlm_jax.programs import Pieces, advance_state, allocate_state, prefill_pieces
from wedlm_jax.roofline import ASSUMPTIONS, Roofline, roofline
from wedlm_jax.params import RowParams
from wedlm_jax.sharding import CACHE_AXES, check_fits, make_mesh, spec, tree_shardings
from wedlm_jax.topology import Chip, Topology, describe_topology

DTYPE = jnp.bfloat16
STOPS = 4
"""Stop tokens a row, as the engine allots them."""


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """What a batch holds.

    Attributes:
      rows: prompts that decode together.
      model_len: tokens of a prompt and its completion, at most.
      max_tokens: of a completion, at most.
      window: W.
    """

    rows: int
    model_len: int
    max_tokens: int
    window: int

    # Static shapes, as the engine makes them.

    @property
    def piece_length(self) -> int:
        """Tokens of a prompt that are prefilled at once."""
        longest = min(self.model_len - self.max_tokens, LONGEST_PIECE)
        return bucket(longest, SMALLEST_PROMPT_BUCKET)

    @property
    def max_output(self) -> int:
        return bucket(self.max_tokens, SMALLEST_OUTPUT_BUCKET)

    @property
    def cache_size(self) -> int:
        """Rows of each prompt's cache."""
        return cache_bucket(self.model_len + num_slots(self.window))


@dataclasses.dataclass(frozen=True)
class CompiledDecoder:
    """What the compiler and the chip's figures say of a batch.

    Attributes:
      topology, devices, mesh, sizes, attention: what it was compiled for.
      weight_bytes, cache_bytes: on one device.
      prefill_peak_bytes, decode_peak_bytes: the compiler's peaks of HBM on one device.
      hbm_limit: what the chip has.
      slots: window slots of a row that a forward runs, in the narrowest window.
      forward_flops: products of a forward on one device.
      least_bytes: what a forward must read on one device: the weights and the cache, once.
      cost: of one forward as compiled, on one device; greedy, in the narrowest window.
      floor: bounds with ``least_bytes``.
      roofline: bounds with the program's own traffic.
      compile_seconds: on this machine, both programs.
    """

    topology: str
    devices: int
    mesh: dict[str, int]
    sizes: DecodeSizes
    attention: str
    weight_bytes: int
    cache_bytes: int
    prefill_peak_bytes: int
    decode_peak_bytes: int
    hbm_limit: int
    slots: int
    forward_flops: float
    least_bytes: int
    cost: ProgramCost
    floor: Roofline
    roofline: Roofline
    compile_seconds: float


def read_model(source: str) -> ModelConfig:
    """The model of a folder with a config.json, or of a recipe (.yaml) that states its sizes."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        return config_from_hf(read_config_json(path))
    try:
        recipe: Any = OmegaConf.to_container(OmegaConf.load(path))
        return config_from_hf({"model_type": "wedlm", **recipe["model"]["architecture"]})
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe") from None
    except (KeyError, TypeError):
        raise InputError(f"{path}: expected a recipe with model.architecture") from None


def decode_mesh(model: ModelConfig, topology: Topology) -> Mesh:
    """Heads over as many devices as there are KV heads for, rows over the rest."""
    tensor = math.gcd(len(topology.devices), model.num_key_value_heads)
    return make_mesh({"tensor": tensor, "data": -1}, topology.devices)


def compile_decoder(
    model: ModelConfig, topology_name: str, sizes: DecodeSizes, attention: str
) -> CompiledDecoder:
    """Lowers and compiles prefill and decode loop for a topology.

    Args:
      attention: of the decode windows, as `Engine` takes it.

    Raises:
      InputError: an unknown topology, sizes that the mesh does not divide, or a program that
        does not fit into the chip's memory.
    """
    if sizes.window:
        model.require_mask_token_id()
    topology = describe_topology(topology_name)
    mesh = decode_mesh(model, topology)
    check_fits(mesh, model, rows=sizes.rows, row_length=sizes.cache_size)
    shapes = nnx.eval_shape(lambda: Transformer(model, rngs=nnx.Rngs(0), dtype=jnp.dtype(DTYPE)))
    graph, parameters = nnx.split(shapes)
    parameters = jax.tree.map(_at, parameters, tree_shardings(mesh, parameters))
    started = time.perf_counter()
    with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
        programs = _lower(mesh, graph, parameters, sizes, attention)
        prefill, decode = (_compile(topology_name, program) for program in programs)
    seconds = time.perf_counter() - started
    return _report(model, topology, mesh, sizes, attention, parameters, prefill, decode, seconds)


def _compile(topology: str, program: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        return program.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        reason = next((line for line in str(error).splitlines() if "hbm" in line.lower()), "")
        raise InputError(f"{topology}: the decoder does not fit: {reason.strip()}") from None


def _at(leaf: Any, sharding: NamedSharding) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _lower(
    mesh: Mesh,
    graph: nnx.GraphDef[Transformer],
    parameters: Any,
    sizes: DecodeSizes,
    attention: str,
) -> tuple[jax.stages.Lowered, jax.stages.Lowered]:
    """The engine's two large programs, lowered for shapes alone: prefill and decode loop."""
    rows = NamedSharding(mesh, spec(["batch"]))

    def array(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=rows)

    shape = {"rows": sizes.rows, "window": sizes.window, "max_output": sizes.max_output,
             "cache_size": sizes.cache_size}  # fmt: skip
    state = _place(mesh, jax.eval_shape(partial(allocate_state, graph, **shape), parameters))
    # As many pieces at once as the engine takes, of each device's rows.
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    each = min(sizes.rows // shards, max(PREFILL_TOKENS // sizes.piece_length, 1))
    count = each * shards
    pieces = Pieces(
        tokens=array(jnp.int32, count, sizes.piece_length),
        places=array(jnp.int32, count),
        starts=array(jnp.int32, count),
        counts=array(jnp.int32, count),
        valid=array(jnp.bool, count),
        lengths=array(jnp.int32, sizes.rows),
    )
    kinds = {"window": jnp.int32, "top_k": jnp.int32, "max_tokens": jnp.int32, "seed": jnp.uint32}
    columns = {
        field.name: array(kinds.get(field.name, jnp.float32), sizes.rows)
        for field in dataclasses.fields(RowParams)
        if field.default is not None  # an option that no row has
    }
    params = RowParams(**{**columns, "stop_ids": array(jnp.int32, sizes.rows, STOPS)})
    number: Any = jax.ShapeDtypeStruct((), jnp.int32)
    prefill = prefill_pieces.lower(graph, parameters, state, pieces, live=0)
    decode = advance_state.lower(
        graph, parameters, state, params, number, number, windows=(sizes.window,),
        refill=REFILLS[0], live=sizes.cache_size, attention=attention,
    )  # fmt: skip
    return prefill, decode


def _place(mesh: Mesh, state: DecodeState) -> DecodeState:
    """The state's shapes with their shardings: the cache by rows and heads, the rest by rows."""
    rows = NamedSharding(mesh, spec(["batch"]))
    whole = NamedSharding(mesh, spec(CACHE_AXES))
    placed = jax.tree.map(lambda leaf: _at(leaf, rows), state)
    return dataclasses.replace(
        placed, cache=jax.tree.map(lambda leaf: _at(leaf, whole), state.cache)
    )


def _report(
    model: ModelConfig,
    topology: Topology,
    mesh: Mesh,
    sizes: DecodeSizes,
    attention: str,
    parameters: Any,
    prefill: jax.stages.Compiled,
    decode: jax.stages.Compiled,
    seconds: float,
) -> CompiledDecoder:
    devices = len(topology.devices)
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(parameters)
    )
    itemsize = jnp.dtype(DTYPE).itemsize
    per_row = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * itemsize
    cache = per_row * sizes.rows * sizes.cache_size // devices
    slots = forward_shapes((sizes.window,))[0].slots
    flops = forward_flops(model, sizes, slots) / devices
    # Of the embedding only the rows of the slots' tokens are read.
    table = model.vocab_size * model.hidden_size * itemsize * (not model.tie_word_embeddings)
    least = weights - table // mesh.shape["tensor"] + cache
    cost = program_cost(decode.as_text() or "", devices=devices, branch=0)
    return CompiledDecoder(
        topology=topology.name,
        devices=devices,
        mesh=dict(mesh.shape),
        sizes=sizes,
        attention=attention,
        weight_bytes=weights,
        cache_bytes=cache,
        prefill_peak_bytes=_peak_bytes(prefill),
        decode_peak_bytes=_peak_bytes(decode),
        hbm_limit=topology.chip.hbm_bytes,
        slots=slots,
        forward_flops=flops,
        least_bytes=least,
        cost=cost,
        floor=_bounds(topology.chip, flops, least, 0),
        roofline=_bounds(topology.chip, flops, cost.hbm_bytes, cost.sent_bytes),
        compile_seconds=seconds,
    )


def _bounds(chip: Chip, flops: float, hbm_bytes: float, sent_bytes: float) -> Roofline:
    return roofline(chip, flops=flops, hbm_bytes=hbm_bytes, sent_bytes=sent_bytes)


def _peak_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    assert memory is not None, "this backend does not count memory"
    return memory.peak_memory_in_bytes


def forward_flops(model: ModelConfig, sizes: DecodeSizes, slots: int) -> float:
    """Products of one forward of all rows: the layers on ``slots`` a row, over the whole
    allotted cache, and the head on W rows."""
    layers = 2 * model.num_parameters(embeddings=False) * sizes.rows * slots
    head = 2 * model.hidden_size * model.vocab_size * sizes.rows * max(sizes.window, 1)
    width = model.num_attention_heads * model.head_dim * model.num_hidden_layers
    return layers + head + 4 * width * sizes.rows * slots * (sizes.cache_size + slots)


def describe(decoder: CompiledDecoder) -> str:
    """The report as lines of text."""
    gib = 2**30
    sizes, limit = decoder.sizes, decoder.hbm_limit
    axes = " x ".join(f"{axis} {size}" for axis, size in decoder.mesh.items() if size > 1)
    seconds, floor = decoder.roofline.seconds, decoder.floor.seconds
    peak = max(decoder.prefill_peak_bytes, decoder.decode_peak_bytes)
    bound = decoder.roofline
    return "\n".join([
        f"{decoder.topology}: {decoder.devices:,} chips as {axes or 'one'}; "
        f"compiled in {decoder.compile_seconds:.0f} s",
        f"batch                {sizes.rows:,} rows of {sizes.model_len:,} tokens at most, "
        f"{sizes.max_tokens:,} of them new; {sizes.cache_size:,} rows of cache each; "
        f"W = {sizes.window}; {decoder.attention} attention",
        f"weights a chip       {decoder.weight_bytes / gib:.2f} GiB (bfloat16)",
        f"cache a chip         {decoder.cache_bytes / gib:.2f} GiB",
        f"peak of HBM a chip   prefill {decoder.prefill_peak_bytes / gib:.2f}, decode "
        f"{decoder.decode_peak_bytes / gib:.2f} of {limit / gib:.0f} GiB, "
        f"{1 - peak / limit:.0%} to spare",
        f"one forward          {decoder.slots} slots a row, greedy; on each chip:",
        f"  products           {decoder.forward_flops:.3g} FLOP",
        f"  must read          {decoder.least_bytes / gib:.2f} GiB: weights and cache once",
        f"  HBM as compiled    {decoder.cost.hbm_bytes / gib:.2f} GiB read and written",
        f"  sent               {decoder.cost.sent_bytes / gib:.3f} GiB",
        f"least time           {1e3 * floor:.2f} ms with what it must read",
        f"as compiled          {1e3 * seconds:.2f} ms, by {bound.bound}: compute "
        f"{1e3 * bound.compute:.2f}, memory {1e3 * bound.memory:.2f}, network "
        f"{1e3 * bound.network:.2f} ms",
        f"at best              {sizes.rows / seconds:,.0f} tokens/s for each token a row commits "
        f"in a forward ({sizes.rows / floor:,.0f} at the least time); prefill apart",
        f"assumed              {'; '.join(ASSUMPTIONS)}",
    ])  # fmt: skip


def main(options: dict[str, Any]) -> int:
    """For `wedlm generate --compile-only`, with its options."""
    if "model" not in options:
        raise InputError("--compile-only needs --model: a folder, or a recipe with its sizes")
    if options.get("window_size") == "auto":
        raise InputError("--compile-only compiles one --window-size: give a number")
    model = read_model(options["model"])
    sizes = DecodeSizes(
        options.get("batch_size", 16),
        options.get("max_model_len", 1280),
        options.get("max_tokens", 256),
        options.get("window_size", 16),
    )
    if min(sizes.rows, sizes.max_tokens, sizes.window + 1) < 1:
        raise InputError("--batch-size and --max-tokens must be at least 1, --window-size 0")
    if sizes.model_len <= sizes.max_tokens:
        raise InputError(
            f"--max-model-len {sizes.model_len} leaves no room for a prompt before "
            f"{sizes.max_tokens} new tokens"
        )
    attention = options.get("attention") or window_implementation("tpu", model.head_dim)
    check_runs_on(attention, "tpu")
    print(describe(compile_decoder(model, options["topology"], sizes, attention)))
    return 0
