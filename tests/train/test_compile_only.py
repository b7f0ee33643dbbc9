"""The step compiles for TPUs on this machine, and its report says what is so."""

import importlib.util

import jax
import pytest

from tests.examples.child import run_python
from tests.examples.training import PLAIN as MODEL
from train.compile_only import CompiledStep, describe
from train.program import make_program
from train.recipe.config import TrainConfig
from train.step_cost import (
    StepFlops,
    model_flops,
    program_flops,
    seen_pairs,
    visited_pairs,
)
from wedlm_jax.aot.cost import ProgramCost, program_cost
from wedlm_jax.aot.topology import CHIPS, Roofline
from wedlm_jax.sharding import make_mesh

STEP = CompiledStep(
    topology="v5p:2x2x1",
    devices=4,
    mesh={"data": 1, "fsdp": 4},
    parameters=8_190_000_000,
    tokens=4096,
    computed_tokens=6144,
    state_bytes=2**30,
    peak_bytes=90 * 2**30,
    hbm_limit=100 * 2**30,
    model_flops=3e15,
    device_flops=StepFlops(9e14, 1e14),
    remat="gate",
    rows=64,
    accumulation=8,
    attention_share={1: 1.5, 10: 11.25},
    options={"xla_of_this_chip": "true"},
    cost=ProgramCost(
        hbm_bytes=2**40,
        collective_bytes={"all-gather": 2**31},
        collective_count={"all-gather": 72},
        sent_bytes=2**31,
        slice_bytes=2**30,
    ),
    roofline=Roofline(2.0, 1.0, 0.5, 0.1),
    mfu_bound=0.75,
    expected=3.5,
    compile_seconds=30.0,
)


LAYER = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16  # q, k and v, o, MLP
NORMS = 3 * (2 * 8) + 8


def test_flops_are_those_counted_by_hand():
    rows, length = 2, 32
    products = 2 * (3 * LAYER + NORMS) * 2 * rows * length
    # The head runs on all of the memory and on the half of the prediction stream that is masked.
    head = 2 * 8 * 100 * 1.5 * rows * length
    # Scores and values of what is seen: half a square of the row, for each stream.
    attention = 3 * 2 * (2 * 24 * length * length) * rows
    config = TrainConfig(rows=2, row_length=32, block_size=8)
    assert model_flops(config, MODEL) == 3 * (products + head + attention)


@pytest.mark.parametrize(
    ("remat", "layers", "attention"),
    [
        ("none", 3 * LAYER, 2 + 5),
        ("products", 3 * LAYER, 2 + 5),
        ("gate", 3 * LAYER + 8 * 16, 2 + 5),
        ("projections", 3 * LAYER + 2 * 8 * 16, 2 + 5),
        ("attention", 4 * LAYER - 8 * 16, 2 + 5),
        ("full", 4 * LAYER - 8 * 16, 2 + 2 + 5),
        ("offload", 4 * LAYER - 8 * 16, 2 + 2 + 5),
    ],
)
def test_what_the_backward_pass_computes_anew_counts(remat, layers, attention):
    config = TrainConfig(row_length=32, block_size=8)
    config.loss.attention, config.loss.remat = "blockwise", remat
    # One tile a stream: the memory on itself, the prediction on the memory and on itself.
    assert visited_pairs(config) == 3 * 32**2
    found = program_flops(config, MODEL, 2)
    head = 3 * 2 * 8 * 100 * 1.5 * 2 * 32
    assert found.products == 2 * (3 * layers + 3 * NORMS) * 2 * 2 * 32 + head
    assert found.attention == 2 * 3 * 24 * 2 * 3 * 32**2 * attention


@pytest.mark.full
def test_a_compiled_step_computes_anew_what_is_counted():
    """The layer's last product is not among it."""
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    counted, compiled = {}, {}
    for remat in ("products", "attention"):
        config = TrainConfig(rows=2, row_length=32, block_size=8)
        config.loss.remat, config.loss.dtype = remat, "float32"
        with jax.set_mesh(mesh):
            text = make_program(config, MODEL, mesh).compile().as_text() or ""
        compiled[remat] = program_cost(text).dot_flops
        counted[remat] = program_flops(config, MODEL, 2).products
    assert (
        compiled["attention"] - compiled["products"] == counted["attention"] - counted["products"]
    )
    assert counted["attention"] > counted["products"]


def test_tiles_of_long_rows_are_those_that_are_visited():
    config = TrainConfig(row_length=4096, block_size=32)
    config.loss.attention, config.loss.tile = "splash", 512
    memory, own = 8 * 9 // 2, 8
    assert visited_pairs(config) == (memory + memory + own) * 512**2
    # Samples of 1,024 are two tiles each, and see no other's.
    assert visited_pairs(config, samples=4) == 4 * (3 + 3 + 2) * 512**2
    assert seen_pairs(config, 4) == 4 * 2 * (1024 * 1025 // 2)
    config.loss.attention = "blockwise"
    assert visited_pairs(config, samples=4) == visited_pairs(config)


def test_blocks_that_are_left_out_are_not_counted():
    config = TrainConfig(rows=2, row_length=32, block_size=8, prediction_blocks=1)
    config.loss.attention, config.loss.remat = "blockwise", "none"
    found = program_flops(config, MODEL, 2)
    # Tokens that go through the layers, and those of the answer, of which half are masked, too.
    layers, head = 3 * 2 * (3 * LAYER + NORMS) * 2 * (32 + 8), 3 * 2 * 8 * 100 * 2 * (8 + 4)
    assert found.products == layers + head
    config = TrainConfig(row_length=4096, block_size=32, prediction_blocks=64)
    config.loss.attention, config.loss.tile = "splash", 512
    # Four tiles of predictions, each as far in the memory as every second of eight.
    assert visited_pairs(config) == (8 * 9 // 2 + 2 + 4 + 6 + 8 + 4) * 512**2
    assert seen_pairs(config) == 4096 * 4097 // 2 * 3 // 2


def test_the_report_says_memory_collectives_and_time():
    text = describe(STEP)
    assert "4 chips as fsdp 4" in text
    assert "4,096; 6,144 of both streams" in text
    assert "micro-batches        8, of 64 rows each" in text
    assert "90.00 of 100 GiB, 10% to spare" in text
    assert "all-gather         72 times, 2.00 GiB per chip" in text
    assert "2.00 GiB to its slice, 1.00 GiB to others" in text
    assert "shortest step        2.000 s, by compute" in text
    assert "2,048 tokens/s, 75%" in text
    assert "at best assumes      products at the chip's bfloat16 peak" in text
    assert "as loss.remat: gate says" in text
    assert "attention 10%" in text
    assert "1.50 times the visible pairs with 1 sample per row, 11.25 times" in text
    assert "expected             3.500 s, 1,170 tokens/s" in text
    assert "products at 0.6 of the peak and attention's at 0.4" in text
    assert "xla_of_this_chip=true" in text


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(
    ("topology", "remat", "blocks"),
    [
        ("v5e:2x4", "attention", 8),
        ("v5e:2x4", "attention", 16),
        ("v5e:2x4", "auto", 8),
        ("v5p:2x2x2", "products", 16),
        ("v6e:2x4", "products", 16),
    ],
)
def test_a_small_step_compiles_for_a_real_topology(topology, remat, blocks):
    """In a process of its own, as the compiler's library wants it."""
    sizes = "hidden_size=256 intermediate_size=512 num_hidden_layers=2 num_attention_heads=8 "
    sizes += "num_key_value_heads=8 vocab_size=1024 eos_token_id=1001"
    command = (
        f"-m wedlm_jax train --config configs/wedlm_8b.yaml --compile-only --topology {topology}"
    )
    command += f" rows=8 row_length=512 prediction_blocks={blocks} mesh.tensor=2 loss.remat={remat}"
    command = [*command.split(), *(f"model.architecture.{size}" for size in sizes.split())]
    done = run_python(*command)
    assert done.returncode == 0, done.stderr
    assert f"{topology}: 8 chips as fsdp 4 x tensor 2" in done.stdout
    hbm = CHIPS[topology.partition(":")[0]].hbm_bytes // 2**30
    assert f"of {hbm} GiB" in done.stdout
    assert f"; {8 * (512 + 32 * blocks):,} of both streams" in done.stdout
