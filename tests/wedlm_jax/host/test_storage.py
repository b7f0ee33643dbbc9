"""What a path means, and what appears whole or not at all where there are no renames."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.emulated_bucket import bucket as bucket
from tests.examples.checkpoints import assert_same_bits, hf_values, write_tiny
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.info import describe as describe_checkpoint
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.errors import InputError
from wedlm_jax.host import storage
from wedlm_jax.host.atomic import part_folder, replacing, write_json
from wedlm_jax.host.storage import as_path, folder_of_this_machine, is_remote


def test_a_folder_is_a_folder_and_other_schemes_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("runs/a", "/runs/a:b", "a b/ü", "C:x"):
        assert as_path(name) == Path(name)
        assert not is_remote(as_path(name))
    for name in ("s3://bucket/run", "az://x", "hf://org/model", "file:///tmp/x"):
        with pytest.raises(InputError, match=rf"{name}: {name[:2]}.*:// is not supported"):
            as_path(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"gs:// needs gcsfs, which is not installed: pip install"):
        as_path("gs://b")


def test_a_path_in_a_bucket_keeps_both_slashes(bucket: str) -> None:
    assert str(as_path(f"{bucket}/run") / "hf") == f"{bucket}/run/hf"
    # As it comes out of `pathlib`.
    assert as_path(Path(f"{bucket}/run")) == as_path(f"{bucket}/run")
    with pytest.raises(InputError, match=r"run: data\.sources cannot be in a bucket; copy it"):
        folder_of_this_machine(f"{bucket}/run", "data.sources")


def names(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def test_a_folder_in_a_bucket_is_replaced_whole_or_counts_for_none(
    bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = as_path(f"{bucket}/replaced")

    def replace(content: str, *more: str) -> None:
        with replacing(folder) as beside:
            for name in ("config.json", "a", "z", *more):
                (beside / name).write_text(content)

    replace("1", "left over")
    assert names(folder) == {"config.json": "1", "a": "1", "z": "1", "left over": "1"}
    with pytest.raises(TypeError):
        replace("2", None)  # type: ignore[arg-type]
    assert names(folder)["a"] == "1"
    # Killed while it is copied: the file that makes it count is not there, before or behind it.
    copied, files = [], storage._files()
    copy = files.cp_file

    def dies(source: str, destination: str) -> None:
        if len(copied) == 2:
            raise KeyboardInterrupt
        copied.append(destination)
        copy(source, destination)

    with monkeypatch.context() as patch:
        patch.setattr(files, "cp_file", dies)
        with pytest.raises(KeyboardInterrupt):
            replace("3")
    assert names(folder) == {"a": "3", "z": "3"}
    replace("4")
    assert names(folder) == {"config.json": "4", "a": "4", "z": "4"}
    assert not part_folder(folder).exists()


def test_a_file_in_a_bucket_is_written_whole(bucket: str) -> None:
    path = as_path(f"{bucket}/a.json")
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'


def test_a_checkpoint_goes_to_a_bucket_and_back(bucket: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "a", dtype="bfloat16", shard_bytes=8000)
    folder = f"{bucket}/models/a"
    model = load_checkpoint(source)
    save_checkpoint(model, model.config, folder, shard_bytes=8000, tokenizer_from=source)
    checkpoint = HFCheckpoint(folder)
    values = {name: tensor.read() for name, tensor in checkpoint.tensors.items()}
    assert_same_bits(values, hf_values(source))
    assert describe_checkpoint(folder)["tensors"] == len(values)
    file = next(iter(checkpoint.files.values())).path
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(InputError, match=rf"{file}: truncated or not a safetensors file \(the hea"):
        HFCheckpoint(folder)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(InputError, match="a Git LFS pointer"):
        HFCheckpoint(folder)
    as_path(f"{folder}/config.json").unlink()
    with pytest.raises(InputError, match=r"config\.json: no such file"):
        HFCheckpoint(folder)
