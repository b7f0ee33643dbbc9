"""A whole training run on a tiny recipe: stopped and resumed, refused, exported."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.tiny_run import (
    ARCHITECTURE,
    metric_lines,
    on_devices,
    run_until_killed,
    tiny_recipe,
)
from train.loop import train as run_training
from train.recipe.config import ModelSection, OptimizerSection
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams


def test_a_run_that_was_killed_and_resumed_is_the_uninterrupted_run(
    finished, tokenizer_folder, tmp_path, capsys
):
    config = tiny_recipe(tmp_path, tokenizer_folder, checkpoint_every=2)
    run_until_killed(config, 2)
    assert not (tmp_path / "hf").exists()
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    capsys.readouterr()
    run_training(config)
    assert "resumed from step 2" in capsys.readouterr().out
    assert metric_lines(tmp_path) == metric_lines(finished)
    assert_same_bits(hf_values(tmp_path / "hf"), hf_values(finished / "hf"))


def test_metrics_have_a_line_a_step_and_the_loss_falls(finished):
    lines = metric_lines(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"loss", "mlm_loss", "ar_loss", "masked_accuracy", "gradient_norm"} <= set(lines[0])
    # A fresh model knows nothing of 300 tokens.
    assert lines[0]["ar_loss"] == pytest.approx(np.log(300), rel=0.02)
    assert lines[-1]["ar_loss"] < lines[0]["ar_loss"]


def test_a_finished_run_started_again_trains_no_further(finished, tokenizer_folder, capsys):
    lines, values = metric_lines(finished), hf_values(finished / "hf")
    run_training(tiny_recipe(finished, tokenizer_folder))
    assert "resumed from step 4" in capsys.readouterr().out
    assert metric_lines(finished) == lines
    assert_same_bits(hf_values(finished / "hf"), values)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_export_has_the_dtype_of_the_recipe(finished, tokenizer_folder, tmp_path, dtype):
    assert {value.dtype.name for value in hf_values(finished / "hf").values()} == {"float32"}
    run = shutil.copytree(finished, tmp_path / "run")
    run_training(tiny_recipe(run, tokenizer_folder, export_dtype=dtype))
    convert(finished / "hf", tmp_path / "expected", to="hf", dtype=dtype)
    assert_same_bits(hf_values(run / "hf"), hf_values(tmp_path / "expected"))
    assert read_config_json(run / "hf")["dtype"] == dtype
    assert load_checkpoint(run / "hf").config == load_checkpoint(finished / "hf").config


def test_the_exported_folder_decodes(finished):
    model = load_checkpoint(finished / "hf")
    assert model.config.model_type == "wedlm"
    tokenizer = Tokenizer.from_file(str(finished / "hf" / "tokenizer.json"))
    assert model.config.mask_token_id == tokenizer.token_to_id("<|mask|>")
    assert model.config.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    llm = LLM(finished / "hf", window_size=4)
    result = llm.generate(["How many?"], SamplingParams(max_tokens=5))[0]
    assert 1 <= len(result.token_ids) <= 5


def test_a_run_says_what_its_model_is(finished, tmp_path):
    """So its newest state is exported without more: here the last, which the run has exported."""
    convert(finished, tmp_path / "out")
    for path in (finished / "hf").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name


def test_wedlm_training_continues_an_ar_checkpoint(tokenizer_folder, tmp_path):
    first = tiny_recipe(tmp_path / "ar", tokenizer_folder, objective="ar", steps=2)
    exported = run_training(first)
    names = set(metric_lines(tmp_path / "ar")[0])
    groups = ("embedding", "attention", "mlp", "norms")
    norms = {f"{what}_norm_{group}" for what in ("parameter", "update") for group in groups}
    assert names - norms == {
        "step",
        "loss",
        "ar_loss",
        "ar_accuracy",
        "gradient_norm",
        "learning_rate",
        "skipped",
        f"epoch/{next(iter(first.data.sources))}",
    }
    assert norms < names
    # A learning rate of nothing gives back what was loaded: tokenizer and parameters.
    second = tiny_recipe(
        tmp_path / "wedlm",
        None,
        steps=1,
        model=ModelSection(init_from=str(exported)),
        optimizer=OptimizerSection(learning_rate=0.0, final_learning_rate=0.0, warmup_steps=0),
    )
    folder = run_training(second)
    assert "mlm_loss" in metric_lines(tmp_path / "wedlm")[0]
    values = hf_values(exported)
    assert_same_bits(hf_values(folder), values)
    assert (folder / "tokenizer.json").read_bytes() == (exported / "tokenizer.json").read_bytes()
    # What goes on imports nothing: the checkpoint may be gone.
    shutil.rmtree(exported)
    assert run_training(dataclasses.replace(second, steps=2)) == folder
    assert [line["step"] for line in metric_lines(tmp_path / "wedlm")] == [1, 2]
    assert_same_bits(hf_values(folder), values)


def test_a_warm_up_that_leaves_no_step_is_refused(tokenizer_folder, tmp_path):
    config = tiny_recipe(
        tmp_path / "run", tokenizer_folder, optimizer=OptimizerSection(warmup_steps=4)
    )
    with pytest.raises(InputError, match=r"warmup_steps must be 0 to 3, below steps, not 4"):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_folder_without_a_tokenizer_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match=r"empty: no tokenizer\.json in this folder"):
        run_training(tiny_recipe(tmp_path / "run", empty))


def test_what_a_run_lacks_is_told_before_anything_is_made(tokenizer_folder, tmp_path):
    config = tiny_recipe(tmp_path / "run", tokenizer_folder)
    config.data.tokenizer = None
    with pytest.raises(InputError, match=r"data\.tokenizer: expected the folder"):
        run_training(config)
    config.evaluation.every = 2
    with pytest.raises(InputError, match=r"evaluation\.source: expected a folder of held-out"):
        run_training(config)
    config.data.sources = {}
    with pytest.raises(InputError, match=r"data\.sources: expected the folders to train on"):
        run_training(config)
    assert not (tmp_path / "run").exists()


def test_an_unknown_field_value_of_the_architecture_is_refused(tokenizer_folder, tmp_path):
    model = ModelSection(architecture={**ARCHITECTURE, "head_dim": 7})
    with pytest.raises(InputError, match="head_dim must be even"):
        run_training(tiny_recipe(tmp_path, tokenizer_folder, model=model))


@pytest.mark.full
def test_a_run_on_two_devices_logs_and_exports_what_one_does(
    tmp_path, tokenizer_folder, monkeypatch
):
    run_training(tiny_recipe(tmp_path / "one", tokenizer_folder))
    on_devices(monkeypatch, 2)
    run_training(tiny_recipe(tmp_path / "two", tokenizer_folder))
    one, two = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    for alone, shared in zip(one, two, strict=True):
        assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-4)
        assert shared["gradient_norm"] == pytest.approx(alone["gradient_norm"], rel=1e-3)


def test_rows_that_the_devices_do_not_share_evenly_are_refused(
    tmp_path, tokenizer_folder, monkeypatch
):
    on_devices(monkeypatch, 8)
    with pytest.raises(InputError, match="rows = 2 is not divisible by data 1 x fsdp 8"):
        run_training(tiny_recipe(tmp_path, tokenizer_folder))


def test_a_kernel_for_other_devices_is_refused_before_anything_is_loaded(
    tmp_path, tokenizer_folder
):
    recipe = tiny_recipe(tmp_path, tokenizer_folder)
    recipe.loss.attention = "splash"
    with pytest.raises(InputError, match="'splash' is for TPUs, not for 'cpu'"):
        run_training(recipe)
