"""Exporting the model of a training run that has not ended."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests.examples.checkpoints import tiny_config, tiny_model, write_tiny
from train.checkpoint import Checkpoints
from train.step import TrainState
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.model_folder import run_model_folder
from wedlm_jax.checkpoint.run_folder import describe_run, newest_state
from wedlm_jax.errors import InputError
from wedlm_jax.model import Transformer

QWEN2 = {"model_type": "qwen2", "qk_norm": False, "attention_bias": True}


def trained(config_changes: dict, factor: float) -> Transformer:
    """A model other than that of the starting checkpoint."""
    model = tiny_model(tiny_config(**config_changes))
    graph, parameters = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: x * factor, parameters))


def write_run(folder: Path, models: dict[int, Transformer]) -> Path:
    """A run's folder with one state for each step."""
    states = Checkpoints(folder / "checkpoints", keep=5)
    for step, model in models.items():
        parameters = nnx.state(model)
        optimizer = optax.adamw(1e-3).init(parameters)
        states.save(TrainState(jnp.int32(step), parameters, optimizer))
    states.close()
    return folder


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {path: np.asarray(x) for path, x in arrays_from_model(load_checkpoint(folder)).items()}


@pytest.mark.parametrize("changes", [{}, QWEN2], ids=["qwen3 style", "qwen2 style"])
def test_newest_state_is_what_the_run_would_export(tmp_path: Path, changes: dict) -> None:
    start = write_tiny(tmp_path / "start", **changes)
    models = {9: trained(changes, 3.0), 10: trained(changes, 2.0)}
    run = write_run(tmp_path / "run", models)
    convert(run, tmp_path / "out", config_from=start)

    expected = tmp_path / "expected"
    config = dataclasses.replace(models[10].config, model_type="wedlm")
    save_checkpoint(models[10], config, expected, tokenizer_from=start)
    files = sorted(path.name for path in expected.iterdir())
    assert "tokenizer.json" in files
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == files
    for name in files:
        assert (tmp_path / "out" / name).read_bytes() == (expected / name).read_bytes(), name


@pytest.mark.full
def test_run_that_says_what_its_model_is_needs_no_configuration(tmp_path: Path) -> None:
    start = write_tiny(tmp_path / "start", **QWEN2)
    run = write_run(tmp_path / "run", {9: trained(QWEN2, 3.0), 10: trained(QWEN2, 2.0)})
    describe_run(run, tiny_config(**QWEN2), start)
    describe_run(run, tiny_config(**QWEN2), start)  # as when it is resumed
    convert(run, tmp_path / "expected", config_from=start)
    for name, source in {"run": run, "states": run / "checkpoints"}.items():
        out = tmp_path / "out" / name
        convert(source, out)
        for path in (tmp_path / "expected").iterdir():
            assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    convert(run / "checkpoints" / "9", tmp_path / "nine")
    before, after = weights(start), weights(tmp_path / "nine")
    np.testing.assert_array_equal(after["embed_tokens"], before["embed_tokens"] * 3)


def test_what_a_run_has_exported_is_no_run(tmp_path: Path) -> None:
    start = write_tiny(tmp_path / "start")
    run = write_run(tmp_path / "run", {1: trained({}, 2.0)})
    describe_run(run, tiny_config(), start)
    write_tiny(run / "hf")
    assert run_model_folder(run) == run / "model"
    assert run_model_folder(run / "hf") is None
    convert(run / "hf", tmp_path / "out")
    assert (tmp_path / "out" / "orbax").is_dir()


@pytest.mark.full
def test_any_level_of_the_run_can_be_named(tmp_path: Path) -> None:
    start = write_tiny(tmp_path / "start")
    run = write_run(tmp_path / "run", {9: trained({}, 3.0), 10: trained({}, 2.0)})
    states = run / "checkpoints"
    assert newest_state(run) == newest_state(states) == states / "10"
    convert(states / "9", tmp_path / "nine", config_from=start)
    before, after = weights(start), weights(tmp_path / "nine")
    np.testing.assert_array_equal(after["embed_tokens"], before["embed_tokens"] * 3)


@pytest.mark.full
def test_configuration_alone_is_enough(tmp_path: Path) -> None:
    start = write_tiny(tmp_path / "start")
    (start / "model.safetensors").unlink()
    run = write_run(tmp_path / "run", {1: trained({}, 2.0)})
    convert(run, tmp_path / "out", config_from=start, to="orbax", dtype="bfloat16")
    convert(tmp_path / "out", tmp_path / "hf")
    assert weights(tmp_path / "hf")["norm.scale"].dtype == jnp.bfloat16
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["dtype"] == "bfloat16"


def test_unfinished_state_is_passed_over(tmp_path: Path) -> None:
    """Orbax writes under another name; a state's folder without its arrays is none either."""
    run = write_run(tmp_path / "run", {4: trained({}, 2.0)})
    (run / "checkpoints" / "5.orbax-checkpoint-tmp-17" / "default").mkdir(parents=True)
    (run / "checkpoints" / "6").mkdir()
    assert newest_state(run).name == "4"


def refusal(source: Path, config_from: Path, *named: str) -> None:
    with pytest.raises(InputError) as error:
        convert(source, source.parent / "out", config_from=config_from)
    assert "\n" not in str(error.value)
    for part in named:
        assert part in str(error.value)
    assert not (source.parent / "out").exists()


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    start = write_tiny(tmp_path / "start")
    run = write_run(tmp_path / "run", {1: trained({}, 2.0)})
    (tmp_path / "empty").mkdir()
    refusal(tmp_path / "none", start, "none", "no complete state")
    refusal(tmp_path / "empty", start, "empty", "no complete state")
    refusal(start, start, "start", "no complete state")
    refusal(run, tmp_path / "none", "config.json", "no such file")
    refusal(run, write_tiny(tmp_path / "wider", intermediate_size=20), "layers.mlp", "shape")
    refusal(run, write_tiny(tmp_path / "biased", attention_bias=True), "shape")


def test_without_a_configuration_the_way_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", {1: trained({}, 2.0)})
    for source in (run, run / "checkpoints", run / "checkpoints" / "1"):
        assert main(["convert", str(source), str(tmp_path / "out")]) == 2
        assert "--config" in capsys.readouterr().err
