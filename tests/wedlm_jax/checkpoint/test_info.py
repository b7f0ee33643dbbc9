"""`wedlm info`: the facts, read from headers alone, and what is said of a bad folder."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.examples.checkpoints import edit_json, hf_values, refused, set_tensors, write_tiny
from tests.examples.child import heavy_imports
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint import open as opening
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.info import as_text, describe
from wedlm_jax.checkpoint.model import load_checkpoint


@pytest.fixture
def folder(tmp_path):
    return write_tiny(tmp_path / "模型")


def line(folder, name):
    """What the text says after ``name``."""
    lines = dict(text.split("  ", 1) for text in as_text(describe(folder)).splitlines())
    return {key.strip(): value.strip() for key, value in lines.items()}[name]


def test_facts(folder, capsys):
    values = hf_values(folder)
    total = sum(x.size for x in values.values())
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert main(["info", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": str(folder),
        "format": "hf",
        "model_type": "wedlm",
        "parameters": {"total": total, "without_embeddings": total - 2 * 24 * 16, "stored": total},
        "dtypes": {"float32": total},
        "tensors": len(values),
        "files": {"count": 4, "bytes": size},
        "architecture": {
            "layers": 3,
            "hidden_size": 16,
            "intermediate_size": 12,
            "heads": 4,
            "kv_heads": 2,
            "head_dim": 6,
            "vocab_size": 24,
            "qkv_bias": False,
            "out_bias": False,
            "mlp_bias": False,
            "qk_norm": True,
            "tied_head": False,
        },
        "rope": {"theta": 10000.0, "type": "default"},
        "context": 64,
        # Keys and values of 3 layers, 2 heads, 6 numbers each.
        "kv_cache_bytes_per_token": {"bfloat16": 144, "float32": 288},
        "token_ids": {"mask": 23, "mask_in_config": True, "pad": None, "eos": [1]},
        "tokenizer": {"present": True, "chat_template": True},
        "decodes": ["wedlm", "ar"],
        "role": "WeDLM model",
    }
    text = as_text(describe(folder)).splitlines()
    assert {len(row) - len(row[12:].lstrip()) for row in text} == {12}, "aligned"
    assert max(map(len, text[1:])) <= 100


def test_orbax_folder_tells_the_same(folder, tmp_path):
    convert(folder, tmp_path / "orbax")
    size = sum(p.stat().st_size for p in (tmp_path / "orbax").rglob("*") if p.is_file())
    ours, theirs = describe(tmp_path / "orbax"), describe(folder)
    assert (ours["format"], ours["files"]["bytes"]) == ("orbax", size)
    own = ("folder", "format", "files")
    assert {**ours, **dict.fromkeys(own)} == {**theirs, **dict.fromkeys(own)}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
EXTENDED = {"tie_word_embeddings": True, "rope_scaling": YARN, "rope_theta": 1e6}
PUBLISHED = {"vocab_size": 151936, "hidden_size": 2, "mask_token_id": None}
UNMASKED = {"mask_token_id": None}
AR = "AR, with drafts from the text"


@pytest.mark.parametrize(
    ("written", "changes", "name", "message"),
    [
        ({}, {}, "heads", "4 of 6, 2 for keys and values, QK-norm"),
        ({}, {}, "vocabulary", "24, own head"),
        ({}, {}, "RoPE", "θ 10,000"),
        ({}, {}, "KV cache", "144 bytes per token in bfloat16, 288 in float32"),
        ({}, {}, "decodes as", "WeDLM or AR (WeDLM model)"),
        ({}, UNMASKED, "decodes as", f"{AR} (no mask_token_id in config.json: set"),
        ({}, {"model_type": "qwen3"}, "decodes as", f"{AR} (can be trained"),
        (PUBLISHED, UNMASKED, "mask token", "151665, not in config.json"),
        (PUBLISHED, UNMASKED, "decodes as", "WeDLM or AR"),
        (EXTENDED, {}, "vocabulary", "24, tied head"),
        (EXTENDED, {}, "RoPE", "θ 1,000,000, yarn, factor 4.0, original_max_position_embeddings"),
    ],
)
def test_what_the_text_says(tmp_path, written, changes, name, message):
    folder = write_tiny(tmp_path / "模型", **written)
    edit_json(folder / "config.json", **changes)
    assert line(folder, name).startswith(message)


def test_a_tied_head_that_is_written_all_the_same_is_no_fault(tmp_path):
    """As some exporters do, though it is the embedding."""
    folder = write_tiny(tmp_path / "a", tie_word_embeddings=True)
    assert "warning" not in as_text(describe(folder))
    set_tensors(folder, **{"lm_head.weight": np.ones((24, 16), np.float32)})
    assert "warning" not in as_text(describe(folder))
    assert load_checkpoint(folder).config.tie_word_embeddings


def test_tokenizer_absent_or_without_template(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    assert line(folder, "tokenizer") == "present, without chat template"
    (folder / "chat_template.jinja").write_text("x")
    assert line(folder, "tokenizer") == "present, with chat template"
    (folder / "tokenizer.json").unlink()
    assert line(folder, "tokenizer") == "none: token ids only"


def test_several_dtypes_and_files_that_disagree_with_the_config(tmp_path):
    folder = write_tiny(tmp_path / "a", dtype="bfloat16")
    set_tensors(folder, **{"model.norm.weight": np.ones(16, np.float32)})
    total = describe(folder)["parameters"]["total"]
    assert line(folder, "dtype") == f"bfloat16 ({total - 16:,} values), float32 (16 values)"
    set_tensors(folder, **{"model.norm.weight": None})
    assert "will not load" in line(folder, "warning")
    sharded = write_tiny(tmp_path / "b", shard_bytes=4000)
    assert describe(sharded)["parameters"]["stored"] == total


def test_only_headers_are_read(folder):
    """Neither JAX nor a tensor's values are needed: a sparse file of 137 GB answers at once."""
    path = folder / "model.safetensors"
    shapes = {name: list(x.shape) for name, x in load_file(path).items()}
    edit_json(folder / "config.json", vocab_size=2**31)
    shapes["lm_head.weight"] = shapes["model.embed_tokens.weight"] = [2**31, 16]
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape, dtype=np.int64))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with path.open("r+b") as file:
        file.truncate(8 + len(text) + end)
    printed, heavy = heavy_imports("info", folder)
    assert "parameters  68.72B" in printed
    assert heavy == ["numpy"]


def test_embedded_model_is_the_default(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(opening, "EMBEDDED_MODEL", folder)
    assert main(["info"]) == 0
    assert str(folder) in capsys.readouterr().out
    monkeypatch.setattr(opening, "EMBEDDED_MODEL", tmp_path / "none")
    assert main(["info"]) == 2
    error = capsys.readouterr().err
    assert "no model is included in this installation" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer_config.json", b"[1", "JSON"),
        ("tokenizer_config.json", None, "cannot be read"),
        ("model.safetensors", b"{", "truncated"),
    ],
)
def test_spoilt_files(folder, name, content, message):
    (folder / name).unlink()
    (folder / name).mkdir() if content is None else (folder / name).write_bytes(content)
    with refused(folder / name, message):
        describe(folder)
