"""The decoder compiles for TPUs on this machine, and its report says what is so."""

import importlib.util
import json

import pytest

from infer.compile_only import (
    BANDWIDTH,
    PRODUCTS,
    DecodeSizes,
    forward_of,
    read_drafter,
    read_model,
)
from tests.examples.child import ROOT, run_python
from wedlm_jax.aot.topology import Chip
from wedlm_jax.config import ModelConfig, config_to_hf
from wedlm_jax.errors import InputError
from wedlm_jax.model.lora import LoraConfig

RECIPE = str(ROOT / "configs" / "wedlm_8b.yaml")
MODEL = ModelConfig(
    vocab_size=1024,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=128,
    qk_norm=True,
    mask_token_id=1000,
    eos_token_ids=(1001,),
)


def forward(sizes, **more):
    """Two sequences on two chips, behind texts of 64 tokens."""
    chip = Chip(0, 1e3, 1e2, 1e1, 1.0)
    return forward_of(MODEL, sizes, 2, 2, 10**7, bytes_per_token=7, chip=chip, **more)


def test_a_forward_is_counted_by_hand():
    counted = forward(DecodeSizes(sequences=2, model_len=64, window=4))
    layer = 256 * 1024 + 2 * 256 * 512 + 1024 * 256 + 3 * 256 * 512
    norms = 3 * (2 * 256 + 2 * 128) + 256
    products = 2 * (3 * layer + norms) * 10 + 2 * 256 * 1024 * 2 * 4
    attention = 3 * 2 * 2 * 1024 * 10 * 64
    assert counted.tokens == 10
    assert counted.flops == (products + attention) / 2
    assert counted.least_bytes == 10**7 - 1024 * 256 * 2 // 2 + 2 * 64 * 7
    assert counted.sent_bytes == 2 * 3 * 10 * 256 * 2
    slowest = max(counted.flops / 1e3 / PRODUCTS, counted.least_bytes / 1e2 / BANDWIDTH)
    assert counted.expected == pytest.approx(slowest + counted.sent_bytes / 1e1)
    assert counted.bound.seconds <= counted.expected
    beside = forward(DecodeSizes(sequences=2, model_len=64, window=4), adapters=30)
    assert beside.flops - counted.flops == 2 * 30 * 10 / 2


def test_drafts_from_the_text_count_as_masks_do():
    """15 drafts behind the last token are as many tokens and rows as AR's one, 16 times."""
    drafts, one = forward(DecodeSizes(2, 64, 0, lookup=15)), forward(DecodeSizes(2, 64, 0))
    assert (drafts.tokens, one.tokens) == (32, 2)
    assert drafts.flops == 16 * one.flops
    assert drafts.least_bytes == one.least_bytes


def test_a_model_and_a_drafter_are_folders_or_recipes(tmp_path):
    model, drafter = read_model(RECIPE), read_drafter(str(ROOT / "configs" / "drafter.yaml"))
    assert (model.num_hidden_layers, model.mask_token_id) == (36, 151665)
    assert drafter == LoraConfig(32, 64, rows="masked", previous_rank=256)
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(model)), encoding="utf-8")
    assert read_model(str(tmp_path)) == model
    config = {"r": 32, "lora_alpha": 64, "target_modules": list(drafter.targets)}
    config["wedlm"] = {"previous_rank": 256}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read_drafter(str(tmp_path)) == drafter
    other = tmp_path / "other.yaml"
    other.write_text("steps: 3\n", encoding="utf-8")
    for read, source, message in (
        (read_model, other, "model.architecture"),
        (read_model, tmp_path / "no.yaml", "no such recipe"),
        (read_drafter, tmp_path / "none", "neither a drafter's folder nor a recipe"),
        (read_drafter, RECIPE, "expected a description of a drafter's adapters"),
    ):
        with pytest.raises(InputError, match=message):
            read(str(source))


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
    config = config_to_hf(MODEL) | {"model_type": family}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    command = "-m wedlm_jax generate --compile-only --topology v5e:2x4 --batch-size 8"
    command += f" --max-model-len 192 --model {tmp_path}"
    done = run_python(*command.split(), *options)
    assert done.returncode == 0, done.stderr
    assert "v5e:2x4: 8 chips as data 2 x tensor 4" in done.stdout
    engine = f"8 sequences of 192 tokens at most; {drafts}; pages of 128; rpa attention"
    assert engine in done.stdout
