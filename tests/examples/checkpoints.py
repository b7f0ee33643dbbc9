"""Tiny random checkpoints and the ways to spoil them, for tests."""

import contextlib
import functools
import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
import yaml
from flax import nnx
from safetensors.numpy import load_file, save_file

from wedlm_jax.checkpoint.model import save_checkpoint
from wedlm_jax.checkpoint.names import arrays_from_model, model_from_arrays, parameter_entries
from wedlm_jax.config import config_from_hf
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import tree_shardings

CONFIG = {
    "model_type": "wedlm",
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "qk_norm": True,
    "mask_token_id": 23,
    "eos_token_id": 1,
    "max_position_embeddings": 64,
}


def published_config(recipe, **changes):
    """Returns the ``config.json`` of a published model, from its recipe in ``configs/``."""
    path = Path(__file__).parents[2] / "configs" / f"{recipe}.yaml"
    architecture = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]["architecture"]
    return {**architecture, **changes}


def tiny_config(**changes):
    return config_from_hf({**CONFIG, **changes})


@functools.cache
def tiny_model(config, dtype="float32"):
    """Random parameters, the norms and biases too: a transposed or swapped one must show."""
    random = np.random.default_rng(7)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    shapes = {entry.path: entry.shape for entry in parameter_entries(config)}
    return model_from_arrays(
        config, {path: random.normal(size=shape).astype(kind) for path, shape in shapes.items()}
    )


def write_tiny(folder, *, dtype="float32", shard_bytes=10**9, **changes):
    """Writes a Hugging Face folder, with a tokenizer's files that only look like some."""
    config = tiny_config(**changes)
    save_checkpoint(tiny_model(config, dtype), config, folder, shard_bytes=shard_bytes)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}', encoding="utf-8")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "é"}', encoding="utf-8")
    return folder


def model_arrays(model):
    """Every array by its path, those of rounded matrices too."""
    return {path: np.asarray(value) for path, value in arrays_from_model(model).items()}


def edit_json(path, remove=None, **changes):
    """Replaces fields of a JSON file, or removes one."""
    raw = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    raw.pop(remove, None)
    path.write_text(json.dumps(raw), encoding="utf-8")


def hf_values(folder):
    """All tensors of a Hugging Face folder, read by the safetensors library alone."""
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def set_tensors(folder, **changes):
    """Replaces, adds or (None) removes tensors of the folder's single file."""
    path = folder / "model.safetensors"
    tensors = {**load_file(path), **changes}
    save_file({name: x for name, x in tensors.items() if x is not None}, path)


def assert_same_bits(a, b):
    assert sorted(a) == sorted(b)
    for name, value in a.items():
        assert value.dtype == b[name].dtype, name
        assert value.shape == b[name].shape, name
        assert value.tobytes() == b[name].tobytes(), name


def assert_placed(model, mesh):
    """Every parameter lies on the mesh as the rules say."""
    state = nnx.state(model)
    wanted = jax.tree.leaves(tree_shardings(mesh, state))
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim), (leaf.shape, leaf.sharding)


def every_float16_pattern(count, dtype):
    """``count`` bit patterns of a 16-bit dtype: subnormals, −0, infinities, NaN payloads."""
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    return np.linspace(0, 65535, count).astype(np.uint16).view(kind)


@contextlib.contextmanager
def refused(*named):
    """What is done must be refused in one sentence that has all these parts."""
    with pytest.raises(InputError) as error:
        yield
    text = str(error.value)
    assert "\n" not in text
    for part in map(str, named):
        assert part in text
