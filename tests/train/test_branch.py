"""A run that begins with a state of another: the same steps, and a folder of its own."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.emulated_bucket import bucket as bucket
from tests.examples.checkpoints import assert_same_bits, hf_values
from tests.examples.data import corpus_rows
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from train.loop import train as run_training
from train.optimizer import schedule_of
from train.recipe.config import (
    DataSection,
    LoraSection,
    ModelSection,
    OptimizerSection,
    PhaseSection,
)
from train.resume import origin_of
from wedlm_jax.checkpoint.orbax import read_arrays, whole_steps
from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import as_path

ADAMW = OptimizerSection(learning_rate=0.01, warmup_steps=1, average=0.5)


def adamw(**changes):
    return {"optimizer": dataclasses.replace(ADAMW, **changes)}


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
@pytest.mark.parametrize("step", [2, 4])
def test_a_branch_with_the_same_recipe_takes_the_same_steps(
    origin, tokenizer_folder, tmp_path, step, capsys
):
    before = files(origin)
    output = tmp_path / "b"
    run_training(recipe(output, tokenizer_folder, branch_from=f"{origin}@{step}"))
    said = capsys.readouterr().out
    assert f"branched from {origin}@{step}" in said
    assert "not as" not in said
    lines = [line for line in metric_lines(origin) if line["step"] > step]
    assert metric_lines(output) == lines
    assert run_states(output) == [one for one in (2, 4, 6) if one >= step]
    for one in run_states(output):
        assert_same_state(output, origin, one)
    assert_same_bits(hf_values(output / "hf"), hf_values(origin / "hf"))
    assert files(origin) == before
    assert json.loads((output / "origin.json").read_text()) == {"run": str(origin), "step": step}


@pytest.mark.full
def test_a_branch_goes_on_without_the_run_that_it_came_from(
    origin, tokenizer_folder, tmp_path, capsys
):
    """Not even a tokenizer is named; killed before it has written a state of its own making."""
    copy = shutil.copytree(origin, tmp_path / "a")
    data = DataSection(sources={str(corpus_rows(tokenizer_folder)): 1.0})
    config = recipe(tmp_path / "b", None, data=data, branch_from=str(copy / "checkpoints" / "4"))
    run_until_killed(config, 5)
    shutil.rmtree(copy)
    capsys.readouterr()
    run_training(config)
    assert "resumed from step 4" in capsys.readouterr().out
    assert metric_lines(tmp_path / "b") == metric_lines(origin)[1:]
    assert_same_state(tmp_path / "b", origin, 6)
    # A branch of a branch says where both came from.
    run_training(recipe(tmp_path / "c", None, data=data, branch_from=f"{tmp_path / 'b'}@4"))
    assert json.loads((tmp_path / "c" / "origin.json").read_text()) == {
        "run": str(tmp_path / "b"),
        "step": 4,
        "origin": {"run": str(copy), "step": 4},
    }


def test_a_decay_is_branched_from_a_plateau(tokenizer_folder, tmp_path, capsys):
    plateau = OptimizerSection(learning_rate=0.01, warmup_steps=1, schedule="wsd")
    run_training(recipe(tmp_path / "a", tokenizer_folder, optimizer=plateau, log_every=1))
    decay = dataclasses.replace(plateau, decay_steps=3, final_learning_rate=0.0)
    config = recipe(
        tmp_path / "b",
        tokenizer_folder,
        optimizer=decay,
        log_every=1,
        steps=7,
        branch_from=f"{tmp_path / 'a'}@4",
        phases=[PhaseSection(from_step=4, rows=4, accumulation=1)],
    )
    capsys.readouterr()
    run_training(config)
    said = capsys.readouterr().out
    assert f"not as in {tmp_path / 'a'}: optimizer.decay_steps was 0, is 3" in said
    assert "output was" not in said
    lines = metric_lines(tmp_path / "b")
    assert [line["step"] for line in lines] == [5, 6, 7]
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([0.01, 0.01 * 2 / 3, 0.01 / 3])
    assert rates == pytest.approx([float(schedule_of(config)(step)) for step in (4, 5, 6)])


@pytest.mark.parametrize(
    ("state", "changes", "told"),
    [
        ("@3", {}, r"has no whole state 3; its states are 2, 4, 6"),
        ("", {}, r"names no step, as .*a@6 does; its states are 2, 4, 6"),
        ("/hf@2", {}, r"hf has no whole state of a training run"),
        ("@6", {}, r"has 6 steps done, and steps is 6"),
        (
            "@4",
            adamw(name="muon"),
            r"\.name was adamw in .* and is muon .* model\.init_from takes param",
        ),
        ("@4", adamw(average=0.0), r"optimizer\.average was 0\.5 in .* and is 0\.0"),
        ("@4", adamw(first_moment_dtype="bfloat16"), r"\.first_moment_dtype was float32"),
        (
            "@4",
            {"model": ModelSection(architecture={"hidden_size": 32})},
            r"hidden_size is 32 in the recipe, and 16 in .*model",
        ),
        ("@4", {"lora": LoraSection(rank=2)}, r"a began with no adapters.* without branch_from"),
        ("@4", {"seed": 5}, r"a@4 began with another recipe: seed was 1, is 5; --allow-ch"),
    ],
)
def test_what_cannot_be_branched_is_refused(
    origin, tokenizer_folder, tmp_path, state, changes, told
):
    before, output = files(origin), tmp_path / "b"
    with pytest.raises(InputError, match=told):
        run_training(recipe(output, tokenizer_folder, branch_from=f"{origin}{state}", **changes))
    assert files(origin) == before
    assert not (output / "config.yaml").exists()
    assert run_states(output) == []


def test_the_arrays_tell_where_there_is_no_recipe(origin, tokenizer_folder, tmp_path):
    copy = shutil.copytree(origin, tmp_path / "a")
    (copy / "config.yaml").unlink()
    for changes, told in (
        (adamw(average=0.0), r"branch_from: .* arrays where .* or optimizer than this recipe's"),
        (adamw(first_moment_dtype="bfloat16"), r"is float32 where this recipe has bfloat16"),
    ):
        with pytest.raises(InputError, match=told):
            run_training(
                recipe(tmp_path / "b", tokenizer_folder, branch_from=f"{copy}@4", **changes)
            )


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
def test_branches_from_a_bucket_and_into_one(bucket, origin, tokenizer_folder, tmp_path):
    there = f"{bucket}/runs/b"
    run_training(recipe(there, tokenizer_folder, branch_from=f"{origin}@2"))
    assert metric_lines(as_path(there)) == metric_lines(origin)
    run_training(recipe(tmp_path / "c", tokenizer_folder, branch_from=f"{there}@4"))
    assert metric_lines(tmp_path / "c") == metric_lines(origin)[1:]
    assert_same_state(tmp_path / "c", origin, 6)
