"""What a run starts from: its checkpoint, mask token and end of turns; runs that cannot begin."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.examples.checkpoints import edit_json
from tests.examples.data import CHAT
from tests.examples.tiny_checkpoint import EOS, write_tiny_checkpoint
from tests.examples.tiny_run import tiny_recipe
from train.data.command import main as tokenize
from train.data.shards import read_manifest
from train.data.tokenizer import save_tokenizer, train_tokenizer
from train.recipe.config import ModelSection, TrainConfig
from train.start import mask_token, recipe_model
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
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


def test_a_recipe_beside_a_checkpoint_is_of_its_model_and_what_else_it_says_holds_and_is_told(
    described, capsys
):
    raw = json.loads((described / "config.json").read_text(encoding="utf-8"))
    same = {"hidden_size": raw["hidden_size"], "qk_norm": True, "model_type": "wedlm"}
    assert recipe_model(recipe(described, **same)) == recipe_model(recipe(described))
    with pytest.raises(InputError, match=r"hidden_size is 4096 in the recipe, and \d+ in "):
        recipe_model(recipe(described, **{**same, "hidden_size": 4096}))
    with pytest.raises(InputError, match=r"architecture\.hiden_size: .* 'hidden_size'"):
        recipe_model(recipe(described, hiden_size=4))
    model = recipe_model(recipe(described, eos_token_id=7, rope_theta=5e5))
    assert (model.eos_token_ids, model.rope.theta) == ((7,), 5e5)
    said = capsys.readouterr().out
    assert "model.architecture: eos_token_ids is (7,) in the recipe, " in said
    assert "model.architecture: rope is " in said


SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture
def qwen(tmp_path):
    """An AR checkpoint whose vocabulary has rows that its tokenizer, without a mask, leaves."""
    folder = write_tiny_checkpoint(tmp_path / "qwen")
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    edit_json(folder / "config.json", **kind, mask_token_id=None)
    tokenizer = train_tokenizer(["a b c"], 262, special_tokens=SPECIALS)
    tokenizer.add_tokens(["<tool>"])
    save_tokenizer(tokenizer, folder)
    edit_json(folder / "tokenizer_config.json", mask_token=None)
    return folder


def tool_id(qwen):
    return Tokenizer.from_file(str(qwen / "tokenizer.json")).token_to_id("<tool>")


def masked_recipe(qwen, **model):
    return tiny_recipe("unused", None, model=ModelSection(init_from=str(qwen), **model))


def chosen(config):
    folder = Path(config.model.init_from or "")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return mask_token(config, tokenizer, HFCheckpoint(folder).config)


def test_the_mask_token_is_the_recipes_or_that_of_the_run_that_goes_on_and_ar_needs_none(
    qwen, tmp_path
):
    config, tool, output = masked_recipe(qwen), tool_id(qwen), tmp_path / "run"
    fresh = chosen(config)
    assert fresh != tool
    assert chosen(masked_recipe(qwen, mask_token="<tool>")) == tool
    assert chosen(masked_recipe(qwen, architecture={"mask_token_id": tool})) == tool
    (output / "model").mkdir(parents=True)
    shutil.copy(qwen / "config.json", output / "model")
    edit_json(output / "model" / "config.json", mask_token_id=tool)
    # There is no state yet that was trained with it, and then there is.
    assert recipe_model(config, qwen).mask_token_id == fresh
    assert recipe_model(config, qwen, output).mask_token_id == tool
    tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    full = dataclasses.replace(HFCheckpoint(qwen).config, vocab_size=tokenizer.get_vocab_size())
    with pytest.raises(InputError, match="rows of the vocabulary are used"):
        mask_token(config, tokenizer, full)
    assert mask_token(dataclasses.replace(config, objective="ar"), tokenizer, full) is None


def test_text_that_has_the_mask_token_is_told(qwen, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a <tool> b <tool>"}\n{"text": "c"}\n')
    rows = tmp_path / "rows"
    options = ["--input", str(tmp_path / "in.jsonl"), "--row-length", "64"]
    assert tokenize([*options, "--tokenizer", str(qwen), "--output", str(rows)]) == 0
    assert "mask token" not in capsys.readouterr().out
    tool = tool_id(qwen)
    config = masked_recipe(qwen, mask_token="<tool>")
    config.data.sources = {str(rows): 1.0}
    chosen(config)
    said = capsys.readouterr().out
    assert f"mask token {tool} (<tool>)" in said
    assert f"{rows}: the text has the mask token {tool} 2 times" in said
    # Of a model that has chosen, it is told when the text is tokenised.
    edit_json(qwen / "config.json", mask_token_id=tool)
    assert tokenize([*options, "--tokenizer", str(qwen), "--output", f"{rows}2"]) == 0
    assert f"input: the text has the mask token {tool} 2 times" in capsys.readouterr().out


DOCUMENT = 0
"""<|endoftext|>, what ends a text of the plain_base checkpoint."""


@pytest.fixture
def plain_base(tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "base")
    edit_json(folder / "config.json", eos_token_id=DOCUMENT)
    generation = {"eos_token_id": DOCUMENT, "max_new_tokens": 2048}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def rows_of(plain_base, folder, record):
    source = folder.with_suffix(".jsonl")
    source.write_text(json.dumps(record) + "\n", encoding="utf-8")
    options = ["--input", str(source), "--output", str(folder), "--row-length", "256"]
    assert tokenize([*options, "--tokenizer", str(plain_base)]) == 0
    return str(folder)


def test_conversations_add_the_end_of_their_turns(plain_base, tmp_path, capsys):
    chats = rows_of(plain_base, tmp_path / "chats", {"messages": CHAT})
    texts = rows_of(plain_base, tmp_path / "texts", {"text": "one two three"})
    assert (read_manifest(Path(chats)).turn_end, read_manifest(Path(texts)).turn_end) == (EOS, None)
    config = tiny_recipe(tmp_path / "run", None, model=ModelSection(init_from=str(plain_base)))
    config.data.sources = {texts: 1.0}
    assert recipe_model(config, plain_base).eos_token_ids == (DOCUMENT,)
    assert "turns end" not in capsys.readouterr().out
    config.data.sources = {texts: 0.5, chats: 0.5}
    model = recipe_model(config, plain_base)
    assert model.eos_token_ids == (EOS, DOCUMENT)
    assert f"turns end with token {EOS}" in capsys.readouterr().out

    # Ends that a model has stay in their order.
    config.model.architecture = {"eos_token_id": [DOCUMENT, EOS]}
    assert recipe_model(config, plain_base).eos_token_ids == (DOCUMENT, EOS)
    assert "turns end" not in capsys.readouterr().out

    # What is exported says so to every program, in both files.
    weights = load_checkpoint(plain_base)
    save_checkpoint(weights, model, tmp_path / "hf", tokenizer_from=plain_base)
    for name in ("config.json", "generation_config.json"):
        said = json.loads((tmp_path / "hf" / name).read_text(encoding="utf-8"))
        assert said["eos_token_id"] == [EOS, DOCUMENT]
    assert said["max_new_tokens"] == 2048
    assert open_checkpoint(tmp_path / "hf").config.eos_token_ids == (EOS, DOCUMENT)
