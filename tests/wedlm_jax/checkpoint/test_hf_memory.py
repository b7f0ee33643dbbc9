"""A checkpoint as large as a real one goes onto a mesh and back within bounded memory."""

import json
import math
import os
import shutil
import sys
import zlib

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from tests.examples.child import run_python
from wedlm_jax.checkpoint.hf import write_config, write_weights
from wedlm_jax.checkpoint.names import parameter_entries
from wedlm_jax.checkpoint.safetensors import DeferredArray
from wedlm_jax.config import config_from_hf

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc"),
]


QWEN3_1_7B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
}
SHARD_BYTES = 750 * 1000**2


PATTERN = np.random.default_rng(0).integers(0, 2**16, 2_097_593, np.uint16)
"""A prime number of them, so that no two rows, layers or tensors are alike."""


def values_of(name, shape):
    """Bit patterns that belong to a name: NaN payloads and subnormals among them."""
    start = zlib.crc32(name.encode()) % len(PATTERN)
    repeated = np.resize(np.roll(PATTERN, start), math.prod(shape))
    return repeated.view(ml_dtypes.bfloat16).reshape(shape)


def large_tensors(**changes):
    def tensor(name, shape):
        return DeferredArray(
            name, shape, np.dtype(ml_dtypes.bfloat16), lambda: values_of(name, shape)
        )

    entries = parameter_entries(config_from_hf({**QWEN3_1_7B, **changes}))
    return [tensor(name, entry.hf_shape) for entry in entries for name in entry.hf_names]


@pytest.fixture
def source(tmp_path):
    """Writes the checkpoint, some fields changed; removed at the end, as what is made of it."""

    def write(**changes):
        folder = tmp_path / "source"
        folder.mkdir()
        write_config(folder, {**QWEN3_1_7B, **changes})
        write_weights(large_tensors(**changes), folder, shard_bytes=SHARD_BYTES)
        return folder

    yield write
    for folder in tmp_path.iterdir():
        shutil.rmtree(folder)


def assert_holds_the_same(folder):
    """Bit by bit, as the safetensors library reads it, tensor by tensor."""
    expected = {tensor.name: tensor for tensor in large_tensors()}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118
                found, wanted = file.get_tensor(name), expected.pop(name).read()
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), name
                assert np.array_equal(found.view(np.uint16), wanted.view(np.uint16)), name
    assert not expected


def measured(*arguments):
    """Runs tests/hf_memory.py in a process of its own, whose peak is that of nothing else."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    done = run_python("-m", "tests.hf_memory", *arguments, timeout=None, env=environment)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return json.loads(done.stdout)


def test_1_7b_onto_eight_devices_and_back(source, tmp_path):
    folder, back = source(), tmp_path / "back"
    assert len(list(folder.glob("*.safetensors"))) == 5
    facts = measured(folder, back, SHARD_BYTES)
    assert facts["parameters"] == 2 * config_from_hf(QWEN3_1_7B).num_parameters()
    file = facts["parameters"] / 5  # on average
    embedding = 2 * QWEN3_1_7B["vocab_size"] * QWEN3_1_7B["hidden_size"]
    assert facts["import"] < facts["parameters"] + 1.3 * file
    assert facts["export"] < facts["parameters"] + embedding + 0.5 * file
    assert len(list(back.glob("*.safetensors"))) == 5
    assert_holds_the_same(back)


def test_rounded_while_read_it_is_never_there_as_it_was(source):
    changes = {"num_hidden_layers": 10, "vocab_size": 4096, "eos_token_id": 9}
    facts = measured(source(**changes), "int8")
    config = config_from_hf({**QWEN3_1_7B, **changes})
    matrices = config.num_parameters(embeddings=False)
    embedding = 2 * config.vocab_size * config.hidden_size
    assert matrices + embedding < facts["parameters"] < 1.01 * matrices + embedding
    assert facts["import"] < facts["parameters"] + 0.5 * matrices
