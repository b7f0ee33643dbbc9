"""Whole runs on a tiny recipe: exported, and ended from outside at any moment without a trace."""

import os
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.interrupted import interrupted
from tests.examples.tiny_run import (
    call_before_step,
    metric_lines,
    on_devices,
    run_until_killed,
    start_command,
    tiny_recipe,
    write_recipe,
)
from tests.train.test_checkpoint import biggest_file, flip
from train.data.shards import read_manifest
from train.distributed import AgreedStop
from train.loop import RunStopped
from train.loop import train as run_training
from train.recipe.config import ModelSection
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.config import read_config_json
from wedlm_jax.errors import TERMINATED, InputError


def test_a_run_logs_each_step_and_exports_a_wedlm_whose_loss_has_fallen(finished):
    lines = metric_lines(finished)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {"loss", "mlm_loss", "ar_loss", "masked_accuracy", "gradient_norm"} <= set(lines[0])
    # A fresh model knows nothing of 300 tokens.
    assert lines[0]["ar_loss"] == pytest.approx(np.log(300), rel=0.02)
    assert lines[-1]["ar_loss"] < lines[0]["ar_loss"]
    config = load_checkpoint(finished / "hf").config
    tokenizer = Tokenizer.from_file(str(finished / "hf" / "tokenizer.json"))
    assert config.model_type == "wedlm"
    assert config.mask_token_id == tokenizer.token_to_id("<|mask|>")
    assert config.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_finished_run_started_again_exports_in_the_dtype_of_the_recipe_and_trains_no_further(
    finished, tokenizer_folder, tmp_path, dtype, capsys
):
    assert {value.dtype.name for value in hf_values(finished / "hf").values()} == {"float32"}
    run = shutil.copytree(finished, tmp_path / "run")
    run_training(tiny_recipe(run, tokenizer_folder, export_dtype=dtype))
    assert "resumed from step 4" in capsys.readouterr().out
    assert metric_lines(run) == metric_lines(finished)
    convert(finished / "hf", tmp_path / "expected", to="hf", dtype=dtype)
    assert_same_bits(hf_values(run / "hf"), hf_values(tmp_path / "expected"))
    assert read_config_json(run / "hf")["dtype"] == dtype
    assert load_checkpoint(run / "hf").config == load_checkpoint(finished / "hf").config


def stop_after(monkeypatch, config, step):
    """Runs until SIGTERM comes in the midst of a step."""
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        call_before_step(patch, step - 1, lambda: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(RunStopped, match=f"stopped after step {step}") as stopped:
            run_training(config)
    assert stopped.value.status == TERMINATED
    assert signal.getsignal(signal.SIGTERM) is before


def test_wedlm_training_continues_an_ar_checkpoint(tokenizer_folder, tmp_path, monkeypatch):
    first = tiny_recipe(tmp_path / "ar", tokenizer_folder, objective="ar", steps=1)
    first.optimizer.warmup_steps = 0
    exported = run_training(first)
    names = set(metric_lines(tmp_path / "ar")[0])
    groups = ("embedding", "attention", "mlp", "norms")
    norms = {f"{what}_norm_{group}" for what in ("parameter", "update") for group in groups}
    epochs = {f"epoch/{source}" for source in first.data.sources}
    of_ar = "step loss ar_loss ar_accuracy gradient_norm learning_rate skipped"
    assert names == {*of_ar.split(), *norms, *epochs}
    second = tiny_recipe(tmp_path / "wedlm", None, model=ModelSection(init_from=str(exported)))
    stop_after(monkeypatch, second, 1)
    # The rate of the first step is 0: it gives back what was loaded, tokenizer and parameters.
    convert(tmp_path / "wedlm", tmp_path / "loaded")
    assert_same_bits(hf_values(tmp_path / "loaded"), hf_values(exported))
    tokenizer = (exported / "tokenizer.json").read_bytes()
    # What goes on imports nothing: the checkpoint may be gone.
    shutil.rmtree(exported)
    folder = run_training(second)
    lines = metric_lines(tmp_path / "wedlm")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all("mlm_loss" in line for line in lines)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer


def test_a_second_ctrl_c_does_not_wait(capsys):
    with AgreedStop() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert capsys.readouterr().err.splitlines() == [
        "stopping when the step under way is done and the state is saved; "
        "Ctrl-C again stops at once",
        "stopping at once",
    ]


def test_a_stopped_run_with_a_damaged_checkpoint_goes_on_from_the_one_before(
    finished, tokenizer_folder, tmp_path, monkeypatch, capsys
):
    config = tiny_recipe(tmp_path, tokenizer_folder, checkpoint_every=1)
    stop_after(monkeypatch, config, 2)
    assert not (tmp_path / "hf").exists()
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2]
    flip(biggest_file(tmp_path / "checkpoints" / "2"))
    capsys.readouterr()
    run_training(config)
    told = capsys.readouterr().out
    assert "is set aside" in told
    [source] = config.data.sources
    rows = read_manifest(Path(source)).rows
    epochs = f"{16 / rows:.2f} epochs of {rows} rows in the whole run, {4 / rows:.2f} done"
    assert f"{source}: {epochs}" in told
    epochs = [line[f"epoch/{source}"] for line in metric_lines(tmp_path)]
    assert epochs == [round(4 * step / rows, 4) for step in (1, 2, 3, 4)]
    assert "resumed from step 1" in told
    assert metric_lines(tmp_path) == metric_lines(finished)
    assert_same_bits(hf_values(tmp_path / "hf"), hf_values(finished / "hf"))


@pytest.mark.full
def test_a_run_goes_on_with_the_same_data_on_another_mesh(
    finished, tokenizer_folder, tmp_path, monkeypatch
):
    config = tiny_recipe(tmp_path, tokenizer_folder, checkpoint_every=2)
    run_until_killed(config, 2)
    on_devices(monkeypatch, 2)
    run_training(config)
    for moved, stayed in zip(metric_lines(tmp_path), metric_lines(finished), strict=True):
        assert moved["step"] == stayed["step"]
        assert moved["loss"] == pytest.approx(stayed["loss"], rel=1e-4)


def test_a_folder_that_a_run_trains_in_is_no_other_run_s(
    finished, tokenizer_folder, tmp_path, monkeypatch
):
    config, refused = tiny_recipe(tmp_path, tokenizer_folder), []

    def begin_another():
        with pytest.raises(InputError, match=f"another process is training in {tmp_path}"):
            run_training(config)
        refused.append(True)

    call_before_step(monkeypatch, 1, begin_another)
    run_training(config)
    assert refused
    assert metric_lines(tmp_path) == metric_lines(finished)


@pytest.mark.full
def test_a_run_ends_and_says_where_it_goes_on(tokenizer_folder, tmp_path):
    recipe = write_recipe(tiny_recipe(tmp_path / "run", tokenizer_folder), tmp_path)
    status, said = interrupted(tmp_path, "step", "train", "--config", str(recipe))
    assert status == 130, said
    assert said.splitlines()[-1] == (
        "wedlm train: interrupted while compiling; the same command continues from the newest "
        "state, or starts over if there is none"
    )
    assert not list((tmp_path / "run").glob("checkpoints/*"))


@pytest.mark.full
def test_sigterm_ends_the_command_with_its_own_status(tokenizer_folder, tmp_path):
    config = tiny_recipe(tmp_path / "run", tokenizer_folder, steps=10_000)
    recipe = write_recipe(config, tmp_path)
    child = start_command(["--config", str(recipe)], tmp_path / "said.txt")
    log = tmp_path / "run" / "metrics.jsonl"
    while not (log.exists() and log.read_text()):
        assert child.exitcode is None
        time.sleep(0.01)
    child.terminate()
    child.join(300)
    said = (tmp_path / "said.txt").read_text()
    assert child.exitcode == TERMINATED, said
    assert "the same command continues from there" in said
    assert list((tmp_path / "run" / "checkpoints").glob("[0-9]*"))
