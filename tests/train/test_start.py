"""What a run starts from: a checkpoint of the architecture that the recipe states."""

import dataclasses
import json

import pytest

from tests.examples.data import EMBEDDED
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.examples.tiny_run import tiny_recipe
from train.loop import train
from train.recipe.config import ModelSection, TrainConfig
from train.start import check_start, recipe_model
from wedlm_jax.errors import InputError


def recipe(folder, **architecture):
    return TrainConfig(model=ModelSection(init_from=str(folder), architecture=architecture))


@pytest.fixture
def described(tmp_path):
    """A checkpoint without its weights."""
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    for file in folder.glob("*.safetensors"):
        file.unlink()
    return folder


def test_a_recipe_for_another_model_is_refused_before_a_weight_is_read(described):
    raw = json.loads((described / "config.json").read_text(encoding="utf-8"))
    same = {"hidden_size": raw["hidden_size"], "qk_norm": True, "model_type": "wedlm"}
    assert recipe_model(recipe(described, **same)) == recipe_model(recipe(described))
    with pytest.raises(InputError, match=r"hidden_size is 4096 in the recipe, and \d+ in "):
        recipe_model(recipe(described, **{**same, "hidden_size": 4096}))


def test_what_a_recipe_says_beside_a_checkpoint_holds_and_is_told(described, capsys):
    model = recipe_model(recipe(described, eos_token_id=7, rope_theta=5e5))
    assert (model.eos_token_ids, model.rope.theta) == ((7,), 5e5)
    said = capsys.readouterr().out
    assert "model.architecture: eos_token_ids is (7,) by the recipe, " in said
    assert "model.architecture: rope is " in said
    with pytest.raises(InputError, match=r"architecture\.hiden_size: .* 'hidden_size'"):
        recipe_model(recipe(described, hiden_size=4))


def test_weights_that_are_not_there_are_refused_before_anything_is_compiled(described):
    with pytest.raises(InputError, match="neither a Hugging Face checkpoint"):
        check_start(recipe(described))


def test_a_refused_run_leaves_no_folder(described, tmp_path):
    config = tiny_recipe(tmp_path / "run", EMBEDDED)
    config.model = ModelSection(init_from=str(described))
    with pytest.raises(InputError, match="neither a Hugging Face checkpoint"):
        train(config)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run").mkdir()
    with pytest.raises(InputError, match="neither a Hugging Face checkpoint"):
        train(config)
    assert (tmp_path / "run").exists(), "one that was there is not the run's to remove"


def test_a_recipe_without_any_model_is_refused_before_anything_is_made(tmp_path):
    config = dataclasses.replace(tiny_recipe(tmp_path / "run", None), model=ModelSection())
    with pytest.raises(InputError, match=r"model\.init_from: expected the folder of the "):
        train(config)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("made", "said"), [(False, "no such folder"), (True, "no tokenizer.json")])
def test_a_folder_without_a_tokenizer_is_told_from_none_at_all(tmp_path, made, said):
    if made:
        (tmp_path / "there").mkdir()
    with pytest.raises(InputError, match=f"there: {said}"):
        train(tiny_recipe(tmp_path / "run", tmp_path / "there"))
