"""A run that begins with a state of another: the same steps, and a folder of its own."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.data import corpus_rows
from tests.examples.tiny_run import changed, metric_lines, run_until_killed, tiny_recipe
from train.loop import train as run_training
from train.optimizer import schedule_of
from train.recipe.config import DataSection, LoraSection, ModelSection, OptimizerSection
from train.resume import origin_of
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.orbax import read_arrays, whole_steps
from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import as_path

ADAMW = OptimizerSection(learning_rate=0.01, warmup_steps=1, average=0.5, schedule="wsd")
"""A plateau, from which a decay can be branched."""


def recipe(output, tokenizer, **changes):
    """Means of three steps are logged, and a state is written every two: within an interval."""
    settings = {"steps": 6, "checkpoint_every": 2, "keep_checkpoints": 9, "log_every": 3}
    return tiny_recipe(output, tokenizer, **{"optimizer": ADAMW, **settings, **changes})


@pytest.fixture(scope="module")
def origin(tokenizer_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("origin") / "a"
    run_training(recipe(output, tokenizer_folder))
    assert run_states(output) == [2, 4, 6]
    return output


def run_states(run):
    return whole_steps(run / "checkpoints")


def files(folder):
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_state(run, other, step):
    """Every array: step, parameters, moments, counts, averages and the guard."""
    place = Path("checkpoints", str(step), "default")
    one, two = (read_arrays(folder / place) for folder in (run, other))
    assert one.keys() == two.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, two[name], err_msg=name)


@pytest.mark.full
def test_a_branch_takes_the_same_steps_without_the_run_that_it_came_from(
    origin, tokenizer_folder, tmp_path, capsys
):
    """Not even a tokenizer is named; killed before it has written a state of its own making."""
    copy = shutil.copytree(origin, tmp_path / "a")
    before = files(copy)
    data = DataSection(sources={str(corpus_rows(tokenizer_folder)): 1.0})
    config = recipe(tmp_path / "b", None, data=data, branch_from=str(copy / "checkpoints" / "2"))
    run_until_killed(config, 3)
    assert files(copy) == before
    shutil.rmtree(copy)
    told = capsys.readouterr().out
    assert f"branched from {copy}@2" in told
    run_training(config)
    told += capsys.readouterr().out
    assert "resumed from step 2" in told
    [difference] = [line for line in told.splitlines() if line.startswith("not as")]
    assert "data.tokenizer was" in difference
    assert metric_lines(tmp_path / "b") == metric_lines(origin)
    assert run_states(tmp_path / "b") == [2, 4, 6]
    for step in (2, 4, 6):
        assert_same_state(tmp_path / "b", origin, step)
    assert_same_bits(hf_values(tmp_path / "b" / "hf"), hf_values(origin / "hf"))
    # A branch of a branch says where both came from.
    run_training(recipe(tmp_path / "c", None, data=data, branch_from=f"{tmp_path / 'b'}@4"))
    assert metric_lines(tmp_path / "c") == metric_lines(origin)[1:]
    assert json.loads((tmp_path / "c" / "origin.json").read_text()) == {
        "run": str(tmp_path / "b"),
        "step": 4,
        "origin": {"run": str(copy), "step": 2},
    }


def test_a_decay_is_branched_from_a_plateau(origin, tokenizer_folder, tmp_path, capsys):
    config = recipe(tmp_path / "b", tokenizer_folder, branch_from=f"{origin}@4", steps=7)
    decay = ("optimizer.decay_steps=3", "optimizer.final_learning_rate=0")
    config = changed(config, *decay, "log_every=1")
    run_training(config)
    told = capsys.readouterr().out
    assert f"not as in {origin}: optimizer.decay_steps was 0, is 3" in told
    assert "output was" not in told
    lines = metric_lines(tmp_path / "b")
    assert [line["step"] for line in lines] == [5, 6, 7]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert rates == pytest.approx([float(schedule_of(config)(step)) for step in (4, 5, 6)])


@pytest.mark.parametrize(
    ("state", "override", "sentence"),
    [
        ("@3", "seed=1", r"has no whole state 3; its states are 2, 4, 6"),
        ("", "seed=1", r"names no step, unlike .*a@6; its states are 2, 4, 6"),
        ("/hf@2", "seed=1", r"hf has no whole state of a training run"),
        ("@6", "seed=1", r"has 6 steps done, and steps is 6"),
        ("@4", "optimizer.name=muon", r"\.name was adamw in .* and is muon .* takes param"),
        ("@4", "optimizer.average=0", r"optimizer\.average was 0\.5 in .* and is 0\.0"),
        ("@4", "optimizer.first_moment_dtype=bfloat16", r"\.first_moment_dtype was float32"),
        ("@4", "model.architecture.hidden_size=32", r"is 32 in the recipe, and 16 in .*model"),
        ("@4", "lora.rank=2", r"a began with no adapters.*; leave branch_from out"),
        ("@4", "seed=5", r"a@4 began with another recipe: seed was 1, is 5; --allow-ch"),
    ],
)
def test_what_cannot_be_branched_is_refused(
    origin, tokenizer_folder, tmp_path, state, override, sentence
):
    before, output = files(origin), tmp_path / "b"
    config = recipe(output, tokenizer_folder, branch_from=f"{origin}{state}")
    with pytest.raises(InputError, match=sentence):
        run_training(changed(config, override))
    assert files(origin) == before
    assert not (output / "config.yaml").exists()
    assert run_states(output) == []


def test_the_arrays_tell_where_there_is_no_recipe(origin, tokenizer_folder, tmp_path):
    copy = shutil.copytree(origin, tmp_path / "a")
    (copy / "config.yaml").unlink()
    config = recipe(tmp_path / "b", tokenizer_folder, branch_from=f"{copy}@4")
    config = changed(config, "optimizer.average=0")
    with pytest.raises(InputError, match=r"branch_from: .* arrays where .* than this recipe's"):
        run_training(config)


def test_a_run_does_not_branch_from_itself(origin, tokenizer_folder):
    with pytest.raises(InputError, match="is the run's own folder; give output another"):
        origin_of(recipe(origin, tokenizer_folder, branch_from=f"{origin}@2"))


@pytest.mark.full
def test_adapters_are_branched_with_what_they_belong_to(origin, tmp_path):
    settings = {
        "model": ModelSection(init_from=str(origin / "hf")),
        "lora": LoraSection(rank=2),
        "steps": 4,
        "log_every": 1,
    }
    run_training(recipe(tmp_path / "a", None, **settings))
    run_training(recipe(tmp_path / "b", None, **settings, branch_from=f"{tmp_path / 'a'}@2"))
    assert metric_lines(tmp_path / "b") == metric_lines(tmp_path / "a")[2:]
    assert_same_bits(hf_values(tmp_path / "b" / "base"), hf_values(tmp_path / "a" / "base"))
    assert_same_bits(hf_values(tmp_path / "b" / "hf"), hf_values(tmp_path / "a" / "hf"))


@pytest.mark.full
def test_a_run_in_a_bucket_is_a_branch_and_what_others_branch_start_or_convert_from(
    bucket, origin, tokenizer_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    there = f"{bucket}/runs/b"
    run_training(recipe(there, tokenizer_folder, branch_from=f"{origin}@2"))
    assert metric_lines(as_path(there)) == metric_lines(origin)
    convert(there, tmp_path / "newest")
    convert(origin, tmp_path / "expected")
    assert_same_bits(hf_values(tmp_path / "newest"), hf_values(tmp_path / "expected"))
    run_training(recipe(tmp_path / "c", tokenizer_folder, branch_from=f"{there}@4"))
    assert metric_lines(tmp_path / "c") == metric_lines(origin)[1:]
    assert_same_state(tmp_path / "c", origin, 6)
    data = DataSection(sources={str(corpus_rows(tokenizer_folder)): 1.0})
    start = {"steps": 2, "data": data, "model": ModelSection(init_from=f"{there}/hf")}
    run_training(tiny_recipe(tmp_path / "d", None, **start))
    assert list(tmp_path.glob("gs:*")) == []
