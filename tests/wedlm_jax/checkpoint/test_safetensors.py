"""One safetensors file: what it says, and what is said of a bad one."""

import os
import stat

import numpy as np
import pytest
from safetensors.numpy import save

from tests.examples.checkpoints import refused
from wedlm_jax.checkpoint.safetensors import DeferredArray, SafetensorsFile, write_safetensors


def write(path, tensors):
    headers = [DeferredArray(name, x.shape, x.dtype, x.copy) for name, x in tensors.items()]
    write_safetensors(path, headers, tensors.values())


def test_file_may_be_read_by_whoever_may_read_the_folder(tmp_path):
    for mode in (0o755, 0o700):
        tmp_path.chmod(mode)
        path = tmp_path / f"{mode}.safetensors"
        write(path, {"a": np.zeros(1, np.float32)})
        assert stat.S_IMODE(os.stat(path).st_mode) == mode & 0o666


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *(
            (lambda whole, end=end: whole[:end], "truncated or not a")
            for end in (0, 7, 40, 1000, -1)
        ),
        (lambda _: np.random.default_rng(0).bytes(4096), "truncated or not a safetensors file"),
        (lambda _: b"version https://git-lfs.github.com/spec/v1\noid", "`git lfs pull` fetches it"),
        (lambda _: save({"q.weight": np.zeros(3, np.int8)}), "'q.weight' has dtype I8"),
        (None, "no such file"),
        ("folder", "not a safetensors file"),
    ],
)
def test_what_is_no_such_file(tmp_path, content, said):
    path = tmp_path / "x.safetensors"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        write(path, {"a": np.zeros((64, 8), np.float32)})
        path.write_bytes(content(path.read_bytes()))
    with refused(path, said):
        SafetensorsFile(path)
