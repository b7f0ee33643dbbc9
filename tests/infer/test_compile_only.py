"""The decoder compiles for TPUs on this machine, and its report says what is so."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from infer.compile_only import CompiledDecoder, DecodeSizes, describe, forward_flops, main
from infer.compile_only import read_model as read
from tests.no_libtpu import NO_LIBTPU, hide_libtpu
from wedlm_jax.__main__ import main as wedlm
from wedlm_jax.config import ModelConfig
from wedlm_jax.errors import InputError
from wedlm_jax.hlo_cost import ProgramCost
from wedlm_jax.roofline import Roofline

ROOT = Path(__file__).parents[2]
MODEL = ModelConfig(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=6,
)  # fmt: skip
SIZES = DecodeSizes(rows=64, model_len=2016, max_tokens=256, window=16)
DECODER = CompiledDecoder(
    topology="v5e:2x4", devices=8, mesh={"data": 1, "tensor": 8}, sizes=SIZES,
    attention="ragged", weight_bytes=2 * 2**30, cache_bytes=2**30, prefill_peak_bytes=12 * 2**30,
    decode_peak_bytes=8 * 2**30, hbm_limit=16 * 2**30, slots=20, forward_flops=1e12,
    least_bytes=3 * 2**30,
    cost=ProgramCost(0, 6 * 2**30, {}, {}, 2**20, 0, 1),
    floor=Roofline(0.001, 0.004, 0.0, 0.0), roofline=Roofline(0.001, 0.008, 0.002, 0.0),
    compile_seconds=5.0,
)  # fmt: skip


def test_shapes_are_those_of_the_engine() -> None:
    assert (SIZES.piece_length, SIZES.max_output, SIZES.cache_size) == (512, 256, 2048)
    short = dataclasses.replace(SIZES, model_len=480)
    assert (short.piece_length, short.cache_size) == (256, 512)


def test_flops_are_those_counted_by_hand() -> None:
    sizes = DecodeSizes(rows=2, model_len=64, max_tokens=32, window=4)
    slots, cache = 5, sizes.cache_size
    layer = 8 * 24 + 2 * 8 * 12 + 24 * 8 + 3 * 8 * 16
    norms = 3 * (2 * 8) + 8
    products = 2 * (3 * layer + norms) * 2 * slots + 2 * 8 * 100 * 2 * 4
    attention = 3 * 2 * 2 * 24 * 2 * slots * (cache + slots)
    assert forward_flops(MODEL, sizes, slots) == products + attention


def test_the_report_says_memory_bytes_and_tokens() -> None:
    text = describe(DECODER)
    assert "8 chips as tensor 8" in text
    assert "prefill 12.00, decode 8.00 of 16 GiB, 25% to spare" in text
    assert "must read          3.00 GiB" in text
    assert "as compiled          8.00 ms, by memory" in text
    assert "8,000 tokens/s for each token a row commits in a forward (16,000 at" in text


def test_a_model_is_a_folder_or_a_recipe(tmp_path: Path) -> None:
    recipe = read(str(ROOT / "configs" / "wedlm_8b.yaml"))
    assert (recipe.num_hidden_layers, recipe.mask_token_id) == (36, 151665)
    config = {"model_type": "wedlm", **recipe_architecture(recipe)}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    assert read(str(tmp_path)) == recipe
    (tmp_path / "other.yaml").write_text("steps: 3\n", encoding="utf-8")
    for source, message in [("other.yaml", "model.architecture"), ("no.yaml", "no such recipe")]:
        with pytest.raises(InputError, match=message):
            read(str(tmp_path / source))


def recipe_architecture(model: ModelConfig) -> dict[str, object]:
    fields = dataclasses.asdict(model)
    return {
        **{name: fields[name] for name in fields if name not in ("rope", "model_type")},
        "rope_theta": model.rope.theta,
        "eos_token_id": list(model.eos_token_ids),
    }


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs --model"),
        ({"max_model_len": 256}, "--max-model-len 256 leaves no room"),
        ({"attention": "ragged_triton"}, "is for NVIDIA GPUs"),
        ({"batch_size": 0}, "--batch-size"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict, message: str) -> None:
    model = {} if message == "needs --model" else {"model": str(ROOT / "configs/wedlm_8b.yaml")}
    with pytest.raises(InputError, match=message):
        main({"topology": "v5e:2x4", **model, **options})


def test_without_the_compiler_the_command_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide_libtpu(monkeypatch)
    recipe = str(ROOT / "configs" / "wedlm_8b.yaml")
    assert wedlm(["generate", "--compile-only", "--model", recipe]) == 2
    assert capsys.readouterr() == ("", f"wedlm generate: {NO_LIBTPU}\n")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_small_decoder_compiles_for_a_real_topology(tmp_path: Path) -> None:
    """In a process of its own: the compiler's library wants one to itself."""
    config = {
        "model_type": "wedlm", "hidden_size": 256, "intermediate_size": 512,
        "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "vocab_size": 1024, "mask_token_id": 1000, "eos_token_id": 1001,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "wedlm_jax", "generate", "--compile-only", "--topology", "v5e:2x4",
         "--model", str(tmp_path), "--batch-size", "8", "--max-model-len", "192",
         "--max-tokens", "64"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "v5e:2x4: 8 chips as data 2 x tensor 4" in done.stdout
    assert "256 rows of cache each; W = 16; ragged attention" in done.stdout
