"""One safetensors file: what it says, and what is said of a bad one."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from wedlm_jax.checkpoint.safetensors_file import SafetensorsFile, write_safetensors
from wedlm_jax.errors import InputError


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    headers = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    write_safetensors(path, headers, tensors.values())


def test_written_values_come_back_bit_for_bit(tmp_path: Path) -> None:
    path = tmp_path / "权重 ü.safetensors"
    bits = np.arange(65536, dtype=np.uint16).reshape(256, 256)  # NaN payloads and −0 as well
    tensors = {
        "a": bits.view(ml_dtypes.bfloat16),
        "b": bits.view(np.float16),
        "c": np.float32([[0.0, -0.0, np.inf]]),
    }
    write(path, tensors)
    file = SafetensorsFile(path)
    assert sorted(file.names()) == ["a", "b", "c"]
    assert [file.dtype(name) for name in "abc"] == ["bfloat16", "float16", "float32"]
    assert file.shape("c") == (1, 3)
    for name, tensor in tensors.items():
        assert file.read(name).dtype == tensor.dtype
        assert file.read(name).tobytes() == tensor.tobytes()


def test_file_may_be_read_by_whoever_may_read_the_folder(tmp_path: Path) -> None:
    for mode in (0o755, 0o700):
        tmp_path.chmod(mode)
        path = tmp_path / f"{mode}.safetensors"
        write(path, {"a": np.zeros(1, np.float32)})
        assert stat.S_IMODE(os.stat(path).st_mode) == mode & 0o666


def message(path: Path) -> str:
    with pytest.raises(InputError) as error:
        SafetensorsFile(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kept", [0, 7, 40, 0.5, -1])
def test_truncated_file(tmp_path: Path, kept: float) -> None:
    path = tmp_path / "x.safetensors"
    write(path, {"a": np.zeros((64, 8), np.float32)})
    content = path.read_bytes()
    end = int(len(content) * kept) if isinstance(kept, float) else kept
    path.write_bytes(content[:end])
    assert "truncated or not a safetensors file" in message(path)


def test_other_binary(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(np.random.default_rng(0).bytes(4096))
    assert "truncated or not a safetensors file" in message(path)


def test_pointer_of_git_lfs(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "`git lfs pull` fetches it" in message(path)


def test_missing_file(tmp_path: Path) -> None:
    assert "no such file" in message(tmp_path / "x.safetensors")


def test_folder_in_its_place(tmp_path: Path) -> None:
    (tmp_path / "x.safetensors").mkdir()
    assert "not a safetensors file" in message(tmp_path / "x.safetensors")


def test_unsupported_dtype_names_the_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"q.weight": np.zeros(3, np.int8)}, path)
    assert "'q.weight' has dtype I8" in message(path)
