"""A base checkpoint that is trained on conversations ends its texts where their turns end."""

import json
from pathlib import Path

import pytest

from tests.examples.data import CHAT
from tests.examples.tiny_checkpoint import EOS, write_tiny_checkpoint
from tests.examples.tiny_run import tiny_recipe
from train.data.command import main as tokenize
from train.data.manifest import read_manifest
from train.recipe.config import ModelSection
from train.start import recipe_model
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint

DOCUMENT = 0
"""<|endoftext|>, what ends a text of the base checkpoint."""


@pytest.fixture
def base(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "base")
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"eos_token_id": DOCUMENT}
    path.write_text(json.dumps(config), encoding="utf-8")
    generation = {"eos_token_id": DOCUMENT, "max_new_tokens": 2048}
    (folder / "generation_config.json").write_text(json.dumps(generation), encoding="utf-8")
    return folder


def rows_of(base, folder, record):
    source = folder.with_suffix(".jsonl")
    source.write_text(json.dumps(record) + "\n", encoding="utf-8")
    options = ["--input", str(source), "--output", str(folder), "--row-length", "256"]
    assert tokenize([*options, "--tokenizer", str(base)]) == 0
    return str(folder)


def test_conversations_add_the_end_of_their_turns(base, tmp_path, capsys):
    chats = rows_of(base, tmp_path / "chats", {"messages": CHAT})
    texts = rows_of(base, tmp_path / "texts", {"text": "one two three"})
    assert (read_manifest(Path(chats)).turn_end, read_manifest(Path(texts)).turn_end) == (EOS, None)
    config = tiny_recipe(tmp_path / "run", None, model=ModelSection(init_from=str(base)))
    config.data.sources = {texts: 1.0}
    assert recipe_model(config, base).eos_token_ids == (DOCUMENT,)
    assert "turns end" not in capsys.readouterr().out
    config.data.sources = {texts: 0.5, chats: 0.5}
    model = recipe_model(config, base)
    assert model.eos_token_ids == (EOS, DOCUMENT)
    assert f"turns end with the token {EOS}" in capsys.readouterr().out

    # What is exported says so to every program, in both files.
    weights = load_checkpoint(base)
    save_checkpoint(weights, model, tmp_path / "hf", tokenizer_from=base)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / "hf" / name).read_text(encoding="utf-8"))
        assert said["eos_token_id"] == [EOS, DOCUMENT]
    assert said["max_new_tokens"] == 2048
    assert open_checkpoint(tmp_path / "hf").config.eos_token_ids == (EOS, DOCUMENT)


def test_ends_that_a_model_has_stay_in_their_order(base, tmp_path, capsys):
    chats = rows_of(base, tmp_path / "chats", {"messages": CHAT})
    config = tiny_recipe(tmp_path / "run", None, model=ModelSection(init_from=str(base)))
    config.model.architecture = {"eos_token_id": [DOCUMENT, EOS]}
    config.data.sources = {chats: 1.0}
    assert recipe_model(config, base).eos_token_ids == (DOCUMENT, EOS)
    assert "turns end" not in capsys.readouterr().out
