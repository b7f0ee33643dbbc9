"""`wedlm generate --compile-only`: the engine's program, compiled for TPUs that are not here.

It is the engine's own program: the same settings, arguments and burst of forwards, with heads, MLP
and vocabulary sharded over ``tensor`` and a replica for each part of ``data``. The compiler reports
the memory that it takes; the chip's figures give the least time of a forward.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from omegaconf import OmegaConf

from wedlm_jax.aot.topology import (
    Chip,
    CompiledProgram,
    Roofline,
    Topology,
    compile_for,
    describe_topology,
)
from wedlm_jax.checkpoint import ADAPTER_CONFIG
from wedlm_jax.checkpoint.open import read_architecture
from wedlm_jax.config import ModelConfig, config_from_hf
from wedlm_jax.decode.backup import room_for
from wedlm_jax.decode.options import Traits
from wedlm_jax.decode.state import num_slots
from wedlm_jax.engine.config import DEFAULT_WINDOW, EngineConfig
from wedlm_jax.engine.programs import lower_burst
from wedlm_jax.engine.settings import (
    BACKUP_MASKS,
    PAGE_SIZES,
    EngineSettings,
    bytes_per_page,
    plan_engine,
)
from wedlm_jax.errors import InputError, errors_at
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import PREVIOUS_RANK, TARGETS, LoraConfig, with_adapters
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import local_bytes, make_mesh, tree_shardings

DTYPE = jnp.dtype(jnp.bfloat16)
GIB = 2**30
PRODUCTS, BANDWIDTH = 0.6, 0.8
"""Shares of a chip's peaks that an expected time assumes. Neither is measured."""


@dataclasses.dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a batch.

    Attributes:
      sequences: number of sequences in all replicas.
      model_len: maximum tokens of a prompt and its completion.
      window: W; 0 for a model that was not trained on masks.
      lookup: maximum number of drafts copied from the text.
    """

    sequences: int
    model_len: int
    window: int
    lookup: int = 0
    backup: int = 0

    @property
    def tokens_each(self) -> int:
        """Tokens of a sequence in a forward: its last one, and masks or drafts."""
        return 1 + (self.window or self.lookup) + self.backup

    @property
    def rows_each(self) -> int:
        """Rows of a sequence that choose tokens. The first of a group of masks chooses none."""
        return (self.window or self.lookup + 1) + max(self.backup - 1, 0)


@dataclasses.dataclass(frozen=True)
class Forward:
    """What one forward of full windows needs on a chip.

    Attributes:
      tokens: tokens that pass through the layers of a replica.
      flops: FLOP of matrix products.
      least_bytes: bytes read from HBM: the weights once, and all keys and values (twice with backup
        masks).
      sent_bytes: bytes sent to other chips: the sums after attention and MLP of each layer.
      bound: lower bounds of the time.
      expected: seconds at `PRODUCTS` and `BANDWIDTH`.
    """

    tokens: int
    flops: float
    least_bytes: int
    sent_bytes: int
    bound: Roofline
    expected: float


@dataclasses.dataclass(frozen=True)
class CompiledDecoder:
    """A compiled decoder, its target, and the compiler's report. Bytes of weights and of all pages
    are those on one device; ``forward`` has the maximum number of sequences, past their prompts."""

    topology: Topology
    mesh: Mesh
    sizes: DecodeSizes
    settings: EngineSettings
    program: CompiledProgram
    weight_bytes: int
    page_bytes: int
    forward: Forward


def read_model(source: str) -> ModelConfig:
    """Reads the model's config from a folder with a config.json, or from a recipe (.yaml) that
    states its sizes."""
    path = Path(source)
    if path.suffix not in (".yaml", ".yml"):
        return read_architecture(path)
    try:
        recipe: Any = OmegaConf.to_container(OmegaConf.load(path))
        stated = {"model_type": "wedlm", **recipe["model"]["architecture"]}
    except FileNotFoundError:
        raise InputError(f"{path}: no such recipe") from None
    except (KeyError, TypeError):
        raise InputError(f"{path}: expected a recipe with model.architecture") from None
    with errors_at(path):
        return config_from_hf(stated)


def read_drafter(source: str) -> LoraConfig:
    """Reads the adapters' config from a drafter's folder, or from a recipe (.yaml) that trains
    one."""
    path = Path(source)
    try:
        if path.suffix in (".yaml", ".yml"):
            recipe: Any = OmegaConf.to_container(OmegaConf.load(path))
            lora, drafter = recipe["lora"], recipe.get("drafter", {})
            rank, alpha, targets = lora["rank"], lora["alpha"], lora.get("targets", TARGETS)
            units = drafter.get("previous_rank", PREVIOUS_RANK)
        else:
            content = json.loads((path / ADAPTER_CONFIG).read_text(encoding="utf-8"))
            rank, alpha, targets = (content[x] for x in ("r", "lora_alpha", "target_modules"))
            units = content["wedlm"].get("previous_rank", 0)
    except FileNotFoundError:
        raise InputError(f"{path}: neither a drafter's folder nor a recipe") from None
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: expected a description of a drafter's adapters") from None
    return LoraConfig(rank, alpha, tuple(targets), "masked", previous_rank=units)


def decode_mesh(model: ModelConfig, topology: Topology) -> Mesh:
    """Shards heads over as many devices as the KV heads allow, and puts replicas on the rest."""
    tensor = math.gcd(len(topology.devices), model.num_key_value_heads)
    return make_mesh({"tensor": tensor, "data": -1}, topology.devices)


def compile_decoder(
    model: ModelConfig,
    topology_name: str,
    sizes: DecodeSizes,
    attention: str | None = None,
    drafter: LoraConfig | None = None,
) -> CompiledDecoder:
    """Lowers and compiles the engine's burst for a topology.

    Args:
      attention: backend, as in `wedlm_jax.engine.engine.Engine`.
      drafter: adapters of a drafter; None for no drafter.

    Raises:
      InputError: an unknown topology, sizes that the mesh does not divide, or a program that
        does not fit into the chip's memory.
    """
    topology = describe_topology(topology_name)
    mesh, chip = decode_mesh(model, topology), topology.chip
    replicas, tensor = mesh.shape["data"], mesh.shape["tensor"]
    if sizes.sequences % replicas:
        raise InputError(f"--batch-size {sizes.sequences} is not divisible by data {replicas}")
    each = sizes.sequences // replicas

    def make() -> Transformer:
        made = Transformer(model, rngs=nnx.Rngs(0), dtype=DTYPE)
        return made if drafter is None else with_adapters(made, drafter, nnx.Rngs(0))

    def at(leaf: Any, sharding: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, DTYPE, sharding=sharding)

    shapes = nnx.eval_shape(make)
    model, (graph, parameters) = shapes.config, nnx.split(shapes)
    parameters = jax.tree.map(at, parameters, tree_shardings(mesh, parameters))
    # Every token passes through the adapters, though only masks use their result.
    adapters = sum(
        leaf.size for leaf in jax.tree.leaves(nnx.filter_state(parameters, nnx.LoRAParam))
    )
    weights = local_bytes(parameters)
    page = PAGE_SIZES["tpu"]
    slots = num_slots(sizes.window, sizes.lookup) + room_for(sizes.backup, page)
    pages = math.ceil((sizes.model_len + slots + 1) / page)
    config = EngineConfig(
        window_size=sizes.window,
        lookup=sizes.lookup,
        backup_masks=sizes.backup,
        max_batch_size=each,
        max_model_len=sizes.model_len,
        attention=attention,
        num_pages=each * pages + 1,
    )
    with jax.set_mesh(mesh), jax.default_device(topology.devices[0]):
        settings, memory = plan_engine(
            model,
            config,
            window=sizes.window,
            lookup=sizes.lookup,
            known_tokens=None,
            dtype=DTYPE,
            platform="tpu",
            replicas=replicas,
            weights=weights,
            limit=chip.hbm_bytes,
        )
        each_token = bytes_per_page(model, page, DTYPE) // page
    traits = Traits.of(SamplingParams(mode="verified"), sizes.window, sizes.lookup)
    compiled = compile_for(
        topology,
        mesh,
        lambda: lower_burst(graph, parameters, model, settings, traits, mesh, choose_layouts=True),
        "decoder",
    )
    forward = forward_of(model, sizes, each, tensor, weights, each_token, chip, adapters)
    return CompiledDecoder(
        topology, mesh, sizes, settings, compiled, weights, memory.pages, forward
    )


def forward_of(
    model: ModelConfig,
    sizes: DecodeSizes,
    sequences: int,
    tensor: int,
    weights: int,
    bytes_per_token: int,
    chip: Chip,
    adapters: int = 0,
) -> Forward:
    """Returns what one forward needs on a chip: all sequences of a replica, each with its last
    token and W masks, or as many drafts as may be copied, after texts of full length.

    Args:
      sequences: number of sequences per replica.
      tensor: number of chips per replica.
      weights, bytes_per_token: bytes of the parameters, and of a token's keys and values, on a
        chip.
      adapters: number of parameters of adapters.
    """
    tokens = sequences * sizes.tokens_each
    width = model.num_attention_heads * model.head_dim * model.num_hidden_layers
    flops = 2 * (model.num_parameters(embeddings=False) + adapters) * tokens
    flops += 2 * model.hidden_size * model.vocab_size * sequences * sizes.rows_each
    flops += 4 * width * tokens * sizes.model_len
    size = DTYPE.itemsize
    # An embedding that is not also the head is not read whole: only the rows of the tokens are.
    table = model.vocab_size * model.hidden_size * size * (not model.tie_word_embeddings)
    # Backup masks are a separate span, which reads the text a second time.
    spans = sequences * (2 if sizes.backup else 1)
    least = weights - table // tensor + spans * sizes.model_len * bytes_per_token
    # A ring of n chips sends 2 (n - 1) / n of what it sums.
    summed = 2 * model.num_hidden_layers * tokens * model.hidden_size * size
    sent = int(summed * 2 * (tensor - 1) / tensor)
    bound = chip.bounds(flops=flops / tensor, hbm_bytes=least, sent_bytes=sent)
    expected = max(bound.compute / PRODUCTS, bound.memory / BANDWIDTH) + bound.network
    return Forward(tokens, flops / tensor, least, sent, bound, expected)


def describe(decoder: CompiledDecoder) -> str:
    """Formats the report as lines of text."""
    topology, sizes, program = decoder.topology, decoder.sizes, decoder.program
    settings, forward, bound = decoder.settings, decoder.forward, decoder.forward.bound
    peak, limit = program.peak_bytes, topology.chip.hbm_bytes
    axes = " x ".join(f"{axis} {size}" for axis, size in decoder.mesh.shape.items() if size > 1)
    drafts = f"W = {sizes.window}" if sizes.window else f"{sizes.lookup} drafts from the text"
    drafts += f" and {sizes.backup} backup masks" if sizes.backup else ""
    lines = [
        f"{topology.name}: {len(topology.devices):,} chips as {axes or 'one'}; compiled in "
        f"{program.seconds:.0f} s",
        f"engine               {sizes.sequences:,} sequences of {sizes.model_len:,} tokens at "
        f"most; {drafts}; pages of {settings.page_size}; {settings.attention} attention",
        f"weights per chip     {decoder.weight_bytes / GIB:.2f} GiB (bfloat16)",
        f"pages per chip       {decoder.page_bytes / GIB:.2f} GiB",
        f"peak HBM per chip    {peak / GIB:.2f} of {limit / GIB:.0f} GiB, "
        f"{1 - peak / limit:.0%} to spare; {program.temporary_bytes / GIB:.2f} GiB of it temporary",
        f"one forward          {forward.tokens:,} tokens of a replica after full texts; on each "
        "chip:",
        f"  products           {forward.flops:.3g} FLOP",
        f"  must read          {forward.least_bytes / GIB:.2f} GiB: weights, keys and values "
        f"{'twice' if sizes.backup else 'once'}",
        f"  must send          {forward.sent_bytes / GIB:.3f} GiB",
        f"least time           {1e3 * bound.seconds:.2f} ms, by {bound.bound}: compute "
        f"{1e3 * bound.compute:.2f}, memory {1e3 * bound.memory:.2f}, network "
        f"{1e3 * bound.network:.2f} ms",
        f"expected             {1e3 * forward.expected:.2f} ms, if products reach "
        f"{PRODUCTS:.0%} and memory {BANDWIDTH:.0%} of their peaks and sending waits",
        f"tokens per second    {sizes.sequences / forward.expected:,.0f} for each token that a "
        "sequence commits in a forward",
    ]
    return "\n".join(lines)


def main(options: dict[str, Any]) -> int:
    """Runs `wedlm generate --compile-only`, with its options."""
    if "model" not in options:
        raise InputError("--compile-only needs --model: a folder, or a recipe with its sizes")
    config = EngineConfig(window_size=options.get("window_size"))
    if config.window_size == "auto":
        raise InputError("--compile-only compiles one --window-size: give a number")
    model = read_model(options["model"])
    drafter = None if options.get("drafter") is None else read_drafter(options["drafter"])
    knows = model.knows_masks or drafter is not None
    window, lookup = config.drafting(knows_masks=knows)
    window = DEFAULT_WINDOW if window == "auto" else window
    # With masks, drafts are not copied.
    lookup = 0 if window else lookup
    backup = min(options.get("backup_masks", BACKUP_MASKS["tpu"]), int(window))
    sizes = DecodeSizes(
        options.get("batch_size", 16),
        options.get("max_model_len", 1536),
        int(window),
        lookup,
        backup,
    )
    if min(sizes.sequences, sizes.window + 1) < 1:
        raise InputError("--batch-size must be at least 1, --window-size at least 0")
    decoder = compile_decoder(model, options["topology"], sizes, options.get("attention"), drafter)
    print(describe(decoder))
    return 0
