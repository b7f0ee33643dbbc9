"""A run chooses its mask token once, writes it down, and tells if the data has it."""

import dataclasses
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.examples.tiny_run import tiny_recipe
from train.data.command import main as tokenize
from train.data.tokenizer import save_tokenizer, train_tokenizer
from train.recipe.config import ModelSection
from train.start import mask_token, recipe_model
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.errors import InputError

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@pytest.fixture
def qwen(tmp_path):
    """An AR checkpoint whose vocabulary has rows that its tokenizer, without a mask, leaves."""
    folder = write_tiny_checkpoint(tmp_path / "qwen")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "mask_token_id": None}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = train_tokenizer(["a b c"], 262, special_tokens=SPECIALS)
    tokenizer.add_tokens(["<tool>"])
    save_tokenizer(tokenizer, folder)
    named = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    del named["mask_token"]
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def tool_id(qwen):
    token = Tokenizer.from_file(str(qwen / "tokenizer.json")).token_to_id("<tool>")
    assert token is not None
    return token


def recipe(qwen, output, **model):
    section = ModelSection(init_from=str(qwen), **model)  # type: ignore[arg-type]
    return tiny_recipe(output, None, model=section)


def chosen(config):
    folder = Path(config.model.init_from or "")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return mask_token(config, tokenizer, HFCheckpoint(folder).config)


def test_an_ar_checkpoint_gets_an_unused_row(qwen, tmp_path):
    config = recipe(qwen, tmp_path / "run")
    tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    used = set(tokenizer.get_vocab().values())
    model = recipe_model(config, qwen)
    mask = model.mask_token_id
    assert mask is not None
    assert mask not in used
    assert mask < model.vocab_size


def test_a_recipe_names_another(qwen, tmp_path):
    tool = tool_id(qwen)
    assert chosen(recipe(qwen, tmp_path / "run", mask_token="<tool>")) == tool
    assert chosen(recipe(qwen, tmp_path / "run", architecture={"mask_token_id": tool})) == tool
    for name in ("<|im_end|>", "<|im_start|>"):
        with pytest.raises(InputError, match="mask token"):
            chosen(recipe(qwen, tmp_path / "run", mask_token=name))


def test_a_run_that_goes_on_keeps_its_own(qwen, tmp_path):
    config, output = recipe(qwen, tmp_path / "run"), tmp_path / "run"
    fresh = chosen(config)
    tool = tool_id(qwen)
    (output / "model").mkdir(parents=True)
    described = json.loads((qwen / "config.json").read_text()) | {"mask_token_id": tool}
    (output / "model" / "config.json").write_text(json.dumps(described))
    # There is no state yet that was trained with it, and then there is.
    assert recipe_model(config, qwen).mask_token_id == fresh
    assert recipe_model(config, qwen, output).mask_token_id == tool


def test_only_masked_training_needs_one(qwen, tmp_path):
    config = recipe(qwen, tmp_path / "run")
    model = HFCheckpoint(qwen).config
    tokenizer = Tokenizer.from_file(str(qwen / "tokenizer.json"))
    full = dataclasses.replace(model, vocab_size=tokenizer.get_vocab_size())
    with pytest.raises(InputError, match="rows of the vocabulary are used"):
        mask_token(config, tokenizer, full)
    assert mask_token(dataclasses.replace(config, objective="ar"), tokenizer, full) is None


def test_text_that_has_the_mask_token_is_told(qwen, tmp_path, capsys):
    (tmp_path / "in.jsonl").write_text('{"text": "a <tool> b <tool>"}\n{"text": "c"}\n')
    rows = tmp_path / "rows"
    options = ["--input", str(tmp_path / "in.jsonl"), "--output", str(rows), "--row-length", "64"]
    assert tokenize([*options, "--tokenizer", str(qwen)]) == 0
    assert "mask token" not in capsys.readouterr().out
    tool = tool_id(qwen)
    config = recipe(qwen, tmp_path / "run", mask_token="<tool>")
    config.data.sources = {str(rows): 1.0}
    chosen(config)
    said = capsys.readouterr().out
    assert f"mask token {tool} (<tool>)" in said
    assert f"{rows}: the text has the mask token {tool} 2 times" in said


def test_tokenize_tells_it_of_a_model_that_has_chosen(qwen, tmp_path, capsys):
    config = json.loads((qwen / "config.json").read_text()) | {"mask_token_id": tool_id(qwen)}
    (qwen / "config.json").write_text(json.dumps(config))
    (tmp_path / "in.jsonl").write_text('{"text": "a <tool> b"}\n')
    options = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "rows")]
    assert tokenize([*options, "--row-length", "64", "--tokenizer", str(qwen)]) == 0
    assert f"input: the text has the mask token {tool_id(qwen)} 1 times" in capsys.readouterr().out
