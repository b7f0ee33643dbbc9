"""The decoder compiles for TPUs on this machine, and its report says what is so."""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer.compile_only import BANDWIDTH, PRODUCTS, DecodeSizes, forward_of, main, read_drafter
from infer.compile_only import read_model as read
from tests.no_libtpu import NO_LIBTPU, hide_libtpu
from wedlm_jax.__main__ import main as wedlm
from wedlm_jax.aot.topology import Chip
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.model.lora import LoraConfig

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=100,
    hidden_size=8,
    intermediate_size=16,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=6,
)


def test_a_forward_is_counted_by_hand():
    """Two sequences on two chips, windows of 4 behind texts of 64 tokens."""
    sizes, chip = DecodeSizes(sequences=2, model_len=64, window=4), Chip(0, 1e3, 1e2, 1e1, 1.0)
    forward = forward_of(MODEL, sizes, 2, 2, weights=10_000, bytes_per_token=7, chip=chip)
    layer = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16
    norms = 3 * (2 * 8) + 8
    products = 2 * (3 * layer + norms) * 10 + 2 * 8 * 100 * 2 * 4
    attention = 3 * 2 * 2 * 24 * 10 * 64
    assert forward.tokens == 10
    assert forward.flops == (products + attention) / 2
    table = 100 * 8 * 2 * (not MODEL.tie_word_embeddings)
    assert forward.least_bytes == 10_000 - table // 2 + 2 * 64 * 7
    assert forward.sent_bytes == 2 * 3 * 10 * 8 * 2
    slowest = max(forward.flops / 1e3 / PRODUCTS, forward.least_bytes / 1e2 / BANDWIDTH)
    assert forward.expected == pytest.approx(slowest + forward.sent_bytes / 1e1)
    assert forward.bound.seconds <= forward.expected
    beside = forward_of(MODEL, sizes, 2, 2, 10_000, 7, chip, adapters=30)
    assert beside.flops - forward.flops == 2 * 30 * 10 / 2


def test_drafts_from_the_text_count_as_masks_do():
    """15 drafts behind the last token are as many tokens and rows as AR's one, 16 times."""
    chip = Chip(0, 1e3, 1e2, 1e1, 1.0)
    drafts, one = (
        forward_of(MODEL, sizes, 2, 2, weights=10_000, bytes_per_token=7, chip=chip)
        for sizes in (DecodeSizes(2, 64, 0, lookup=15), DecodeSizes(2, 64, 0))
    )
    assert (drafts.tokens, one.tokens) == (32, 2)
    assert drafts.flops == 16 * one.flops
    assert drafts.least_bytes == one.least_bytes


def test_a_model_is_a_folder_or_a_recipe(tmp_path):
    recipe = read(str(ROOT / "configs" / "wedlm_8b.yaml"))
    assert (recipe.num_hidden_layers, recipe.mask_token_id) == (36, 151665)
    config = {"model_type": "wedlm", **recipe_architecture(recipe)}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read(str(tmp_path)) == recipe
    (tmp_path / "other.yaml").write_text("steps: 3\n", encoding="utf-8")
    for source, message in [("other.yaml", "model.architecture"), ("no.yaml", "no such recipe")]:
        with pytest.raises(InputError, match=message):
            read(str(tmp_path / source))


def test_a_drafter_is_a_folder_or_a_recipe(tmp_path):
    recipe = read_drafter(str(ROOT / "configs" / "drafter.yaml"))
    assert recipe == LoraConfig(32, 64, rows="masked", previous_rank=256)
    config = {"r": 32, "lora_alpha": 64, "target_modules": list(recipe.targets)}
    config["wedlm"] = {"previous_rank": 256}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_drafter(str(tmp_path)) == recipe
    with pytest.raises(InputError, match="neither a drafter's folder nor a recipe"):
        read_drafter(str(tmp_path / "none"))
    with pytest.raises(InputError, match="expected a description of a drafter's adapters"):
        read_drafter(str(ROOT / "configs" / "wedlm_8b.yaml"))


def recipe_architecture(model):
    fields = dataclasses.asdict(model)
    return {
        **{name: fields[name] for name in fields if name not in ("rope", "model_type")},
        "rope_theta": model.rope.theta,
        "eos_token_id": list(model.eos_token_ids),
    }


def test_options_that_cannot_be_are_refused():
    model = {"model": str(ROOT / "configs/wedlm_8b.yaml")}
    for options, message in (
        ({}, "needs --model"),
        (model | {"window_size": "auto"}, "one --window-size"),
        (model | {"batch_size": 0}, "--batch-size"),
    ):
        with pytest.raises(InputError, match=message):
            main({"topology": "v5e:2x4", **options})


def test_without_the_compiler_the_command_says_what_to_install(monkeypatch, capsys):
    hide_libtpu(monkeypatch)
    recipe = str(ROOT / "configs" / "wedlm_8b.yaml")
    assert wedlm(["generate", "--compile-only", "--model", recipe]) == 2
    assert capsys.readouterr() == ("", f"wedlm generate: {NO_LIBTPU}\n")


SMALL = {
    "model_type": "wedlm",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
    "mask_token_id": 1000,
    "eos_token_id": 1001,
}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize(
    ("family", "drafts", "options"),
    [
        ("wedlm", "W = 16 and 8 backup masks", []),
        ("qwen3", "15 drafts from the text", []),
        ("qwen3", "W = 16 and 8 backup masks", ["--drafter", "configs/drafter.yaml"]),
    ],
)
def test_a_small_decoder_compiles_for_a_real_topology(tmp_path, family, drafts, options):
    """In a process of its own: the compiler's library wants one to itself."""
    config = SMALL | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = "-m wedlm_jax generate --compile-only --topology v5e:2x4 --batch-size 8"
    command += f" --max-model-len 192 --model {tmp_path}"
    done = subprocess.run(
        [sys.executable, *command.split(), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "v5e:2x4: 8 chips as data 2 x tensor 4" in done.stdout
    assert (
        f"8 sequences of 192 tokens at most; {drafts}; pages of 128; rpa attention" in done.stdout
    )
