"""A checkpoint as large as a real one goes onto a mesh and back within bounded memory."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from wedlm_jax.config import config_from_hf
from wedlm_jax.hf import parameter_entries, write_config
from wedlm_jax.hf_export import Tensor, plan_files, write_weights

ROOT = Path(__file__).parents[2]

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


def bits(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Any bit patterns, the same for a name: NaN payloads and subnormals among them."""
    content = np.random.default_rng(zlib.crc32(name.encode())).bytes(2 * math.prod(shape))
    return np.frombuffer(content, ml_dtypes.bfloat16).reshape(shape)


def digest(values: np.ndarray) -> str:
    return hashlib.sha1(np.ascontiguousarray(values).view(np.uint8).data).hexdigest()


def write_large(folder: Path) -> dict[str, str]:
    """Writes the checkpoint in five files; returns a digest for each tensor."""
    digests: dict[str, str] = {}

    def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
        def read() -> np.ndarray:
            values = bits(name, shape)
            digests[name] = digest(values)
            return values

        return Tensor(name, shape, np.dtype(ml_dtypes.bfloat16), read)

    entries = parameter_entries(config_from_hf(QWEN3_1_7B))
    tensors = [tensor(name, entry.hf_shape) for entry in entries for name in entry.hf_names]
    folder.mkdir()
    write_config(folder, QWEN3_1_7B)
    files = plan_files(tensors, SHARD_BYTES)
    assert len(files) == 5
    write_weights(files, folder)
    return digests


def stored_digests(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            yield from ((name, digest(file.get_tensor(name))) for name in file.keys())  # noqa: SIM118


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak from /proc")
def test_1_7b_onto_eight_devices_and_back(tmp_path: Path) -> None:
    source, back = tmp_path / "source", tmp_path / "back"
    try:
        digests = write_large(source)
        done = subprocess.run(
            [sys.executable, "-m", "tests.hf_memory", str(source), str(back), str(SHARD_BYTES)],
            cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True,
            timeout=1200, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        facts = json.loads(done.stdout)
        print(facts)
        assert facts["parameters"] == 2 * config_from_hf(QWEN3_1_7B).num_parameters()
        most = facts["parameters"] + 1.3 * facts["parameters"] / 5  # a file on average
        assert facts["import"] < most
        assert facts["export"] < most
        assert len(list(back.glob("*.safetensors"))) == 5
        assert dict(stored_digests(back)) == digests
    finally:
        shutil.rmtree(source, ignore_errors=True)
        shutil.rmtree(back, ignore_errors=True)
