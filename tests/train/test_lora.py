"""Training adapters alone: the step, on one device and on a mesh, and a whole run."""

import dataclasses
import json
import shutil
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from tests.examples.train_step import (
    DIVIDED,
    KEY,
    assert_same_gradients,
    fresh_state,
    many_rows,
    named,
    optimizer,
    run_steps,
)
from tests.examples.training import BLOCK, MASK_TOKEN, TINY, tiny_transformer
from tests.jaxpr_shapes import arrays_in
from tests.train.test_evaluation import evaluations
from train.loop import train as run_training
from train.program import make_program
from train.recipe.config import EvaluationSection, LoraSection, ModelSection
from train.step import Objective, accumulate, make_train_step, prepare, prepare_given
from train.step_cost import model_flops, program_flops
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.sharding import batch_sharding, make_mesh, tree_shardings

LORA = LoraConfig(rank=2, alpha=6.0)
MODEL = with_adapters(tiny_transformer(**DIVIDED), LORA, nnx.Rngs(params=1))
GRAPH, FIRST, FROZEN = nnx.split(MODEL, nnx.LoRAParam, ...)


def objective(**changes):
    return Objective("wedlm", BLOCK, MASK_TOKEN, LossConfig(chunk=8, **changes))


def adapters(seed=0):
    """Adapters that have been trained: none of their gradients is zero."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(random.normal(size=x.shape) / 4, x.dtype), FIRST)


def adapted_state():
    return fresh_state(parameters=adapters(), frozen=FROZEN)


@cache
def rows():
    return many_rows(np.random.default_rng(4), prompt=lambda length: 2)


step = make_train_step(GRAPH, optimizer(), objective())


@cache
def on_one_device():
    return run_steps(step, adapted_state(), [rows()[0]] * 2)


def test_gradients_are_those_of_merged_matrices():
    plain, _ = nnx.split(tiny_transformer(**DIVIDED))
    batch = rows()

    @jax.jit
    def both(parameters):
        given = prepare_given(objective(), *batch)

        def by_merging(parameters):
            flat = dict(nnx.to_flat_state(FROZEN))
            trained = {path: leaf[...] for path, leaf in nnx.to_flat_state(parameters)}
            for path in [path[:-2] for path in trained if path[-1] == "a"]:
                a, b = (trained[(*path, "adapter", part)] for part in "ab")
                weight = flat[(*path, "weight")]
                value = weight[...] + 3.0 * jnp.einsum("lri,lor->loi", a, b)
                flat[(*path, "weight")] = weight.replace(value)
            return nnx.State.from_flat_path(flat)

        whole, vjp = jax.vjp(by_merging, parameters)
        by_kernels, metrics = accumulate(plain, whole, *given)
        ours, ours_metrics = accumulate(GRAPH, parameters, *given, FROZEN)
        return ours, vjp(by_kernels)[0], ours_metrics["loss"], metrics["loss"]

    ours, theirs, loss, merged_loss = both(adapters())
    assert float(loss) == pytest.approx(float(merged_loss), rel=1e-5)
    assert len(named(theirs)) == 14
    assert_same_gradients(ours, theirs)


@pytest.mark.full
@pytest.mark.parametrize(
    "layout",
    [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "tensor": 2, "sequence": 2}],
    ids=str,
)
def test_on_a_mesh_it_is_the_step_of_one_device(layout):
    mesh, state = make_mesh(layout), adapted_state()
    state = jax.device_put(state, tree_shardings(mesh, state))
    with jax.set_mesh(mesh):
        metrics, found = run_steps(
            step, state, [jax.device_put(rows()[0], batch_sharding(mesh))] * 2
        )
        kept = step(jax.device_put(found, tree_shardings(mesh, found)), rows()[0], KEY)[0]
    expected_metrics, expected = on_one_device()
    was = named(adapters())
    for name, after in named(expected.parameters).items():
        assert np.abs(after - was[name]).max() > 1e-3, name
    for own, one in zip(jax.tree.leaves(metrics), jax.tree.leaves(expected_metrics), strict=True):
        np.testing.assert_allclose(own, one, rtol=5e-5)
    for own, one in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, one, rtol=2e-4, atol=2e-5)
    # Each adapter has one side that is cut, by the axes of its matrix.
    for path, value in jax.tree.leaves_with_path(kept.parameters):
        assert len({str(shard.index) for shard in value.addressable_shards}) == 2, path


@pytest.mark.full
def test_no_gradient_and_no_float32_copy_of_a_frozen_matrix_exists():
    """The embedding, a matrix and a head have shapes of their own; each is bfloat16 throughout."""
    graph, first, frozen = nnx.split(
        with_adapters(tiny_transformer(), LORA, nnx.Rngs(0)), nnx.LoRAParam, ...
    )
    sides = {(12, 24), (24, 12), (12, 20), (20, 12), (97, 12), (12, 97)}

    def large(frozen, parameters):
        def gradients(parameters, frozen):
            given = objective(dtype="bfloat16", remat="attention")
            batches, totals, loss = prepare(given, rows()[0], KEY)
            return accumulate(graph_of, parameters, batches, totals, loss, frozen)[0]

        graph_of = graph if frozen is not None else nnx.graphdef(tiny_transformer())
        traced = jax.make_jaxpr(gradients)(parameters, frozen).jaxpr
        return {
            tuple(array.shape[-2:])
            for array in arrays_in(traced)
            if array.dtype == jnp.float32 and tuple(array.shape[-2:]) in sides
        }

    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), frozen)
    assert large(half, first) == set()
    # Where all is trained each exists, as it lies: [out, in].
    assert large(None, nnx.state(tiny_transformer())) == sides - {(12, 97)}


def lora_recipe(output, init_from, **changes):
    model = ModelSection(init_from=None if init_from is None else str(init_from))
    lora = LoraSection(rank=4, alpha=8.0)
    return tiny_recipe(output, None, model=model, lora=lora, **changes)


def test_products_are_those_counted_by_hand():
    config = dataclasses.replace(lora_recipe(Path("unused"), None), rows=1, accumulation=1)
    tokens, layers = 2 * 128, TINY.num_hidden_layers
    hidden, inner = TINY.hidden_size, TINY.intermediate_size
    sides = 2 * (hidden + 24) + 2 * (hidden + 12) + 3 * (hidden + inner)
    attention = 2 * 2 * (4 * 6 * layers) * tokens * 128 / 2
    whole = dataclasses.replace(config, lora=LoraSection())
    forward = model_flops(whole, TINY) / 3
    expected = 3 * attention + 2 * (forward - attention) + 3 * 2 * tokens * layers * 4 * sides
    assert model_flops(config, TINY) == expected
    assert program_flops(whole, TINY, 1).products - program_flops(config, TINY, 1).products == (
        forward - attention - 3 * 2 * tokens * layers * 4 * sides
    )


def test_a_program_holds_moments_of_adapters_and_the_rest_once_in_the_compute_dtype():
    config = lora_recipe(Path("unused"), None)
    config.loss.dtype = "bfloat16"
    config.lora.targets = ["q_proj"]
    state = make_program(config, TINY, make_mesh({}, jax.devices()[:1])).state
    count = sum(x.size for x in jax.tree.leaves(state.parameters))
    assert count == 2 * 4 * (12 + 24)
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim]
    assert sum(x.size for x in moments) == 2 * count
    assert {x.dtype for x in jax.tree.leaves(state.frozen)} == {np.dtype(ml_dtypes.bfloat16)}
    assert sum(x.size for x in jax.tree.leaves(state.frozen)) == TINY.num_parameters()


@pytest.fixture(scope="module")
def base(finished):
    return finished / "hf"


@pytest.fixture(scope="module")
def whole_run(base, tmp_path_factory):
    output = tmp_path_factory.mktemp("lora") / "run"
    run_training(lora_recipe(output, base, checkpoint_every=2))
    return output


def test_a_run_saves_adapters_alone_and_exports_the_base_with_what_they_add(whole_run, base):
    before, after = hf_values(base), hf_values(whole_run / "hf")
    assert after.keys() == before.keys()
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    kernels = {name for name in before if "_proj.weight" in name}
    assert changed == kernels
    for name in kernels:
        difference = (after[name] - before[name]).astype(np.float64)
        strength = np.linalg.svd(difference, compute_uv=False)
        assert strength[4:].max(initial=0.0) < 1e-4 * strength[0], name  # of rank 4
    assert_same_bits(hf_values(whole_run / "base"), before)
    metrics = metric_lines(whole_run)[0]
    assert {"parameter_norm_attention", "update_norm_mlp"} <= set(metrics)
    assert "parameter_norm_embedding" not in metrics
    described = (whole_run / "checkpoints" / "4" / "default" / "_METADATA").read_text()
    arrays = json.loads(described)["tree_metadata"].values()
    shapes = [array["value_metadata"]["write_shape"] for array in arrays]
    matrices = [shape for shape in shapes if len(shape) > 1]
    assert len(matrices) == 3 * 2 * 7  # A and B of each target and their moments, layers stacked
    assert all(4 in shape for shape in matrices), "of rank 4, so none of the base"
    saved = json.loads((whole_run / "model" / "lora.json").read_text())
    assert (saved["rank"], saved["alpha"], len(saved["targets"])) == (4, 8.0, 7)


def test_a_state_is_converted_as_the_run_exports_it(whole_run, tmp_path):
    convert(whole_run, tmp_path / "out")
    for path in (whole_run / "hf").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    convert(whole_run / "checkpoints" / "2", tmp_path / "two", to="orbax")
    convert(tmp_path / "two", tmp_path / "back")
    two, four = hf_values(tmp_path / "back"), hf_values(whole_run / "hf")
    name = "model.layers.0.mlp.up_proj.weight"
    assert 0 < np.abs(two[name] - four[name]).max() < 1


@pytest.mark.full
def test_a_run_that_was_killed_goes_on_without_the_checkpoint_it_began_with(
    whole_run, base, tmp_path
):
    start = shutil.copytree(base, tmp_path / "start")
    config = lora_recipe(tmp_path / "run", start, checkpoint_every=2)
    run_until_killed(config, 3)
    shutil.rmtree(start)
    for change, sentence in (
        ({"alpha": 16.0}, "began with adapters of rank 4, alpha 8 .* has adapters of rank 4, alph"),
        ({"targets": ["q_proj"]}, "the recipe has adapters of rank 4, alpha 8 on q_proj; use"),
        ({"rank": 0}, "the recipe has no adapters; use another output than"),
    ):
        other = dataclasses.replace(config.lora, **change)
        with pytest.raises(InputError, match=f"lora: this run .*{sentence}"):
            run_training(dataclasses.replace(config, lora=other))
    kept = (tmp_path / "run" / "base").rename(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"run/base"):
        run_training(config)
    kept.rename(tmp_path / "run" / "base")
    run_training(config)
    assert metric_lines(tmp_path / "run") == metric_lines(whole_run)
    assert_same_bits(hf_values(tmp_path / "run" / "hf"), hf_values(whole_run / "hf"))


@pytest.mark.full
def test_a_run_averages_and_evaluates_its_adapters(base, tmp_path):
    """The rate of the first step is 0, so what the run began with, merged, is evaluated twice."""
    section = EvaluationSection(every=1, rows=2, prompts=1, max_tokens=4)
    config = lora_recipe(tmp_path, base, evaluation=section, steps=2)
    config.optimizer.average = 0.9
    run_training(config)
    begun, first, second = evaluations(tmp_path)
    assert {"tokens_per_forward", "p_cache"} <= first.keys()
    assert begun["loss"] == first["loss"] != second["loss"]
    values, before = hf_values(tmp_path / "hf"), hf_values(base)
    name = "model.layers.1.mlp.gate_proj.weight"
    assert 0 < np.abs(values[name] - before[name]).max() < 1
