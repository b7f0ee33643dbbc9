"""What a path means, and what appears whole or not at all where there are no renames."""

import errno
import importlib.util
import json
import tempfile
from pathlib import Path

import pytest

from infer.evaluate import check
from infer.generate import check_trace
from tests.examples.checkpoints import assert_same_bits, hf_values, write_tiny
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.info import describe as describe_checkpoint
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host import storage
from wedlm_jax.host.atomic import check_writable, part_folder, replacing, write_json
from wedlm_jax.host.storage import (
    as_path,
    folder_of_this_machine,
    is_of_storage,
    is_remote,
    retried,
    storage_message,
)


def test_a_folder_is_a_folder_and_other_schemes_are_refused_by_name(monkeypatch):
    for name in ("runs/a", "/runs/a:b", "a b/ü", "C:x"):
        assert as_path(name) == Path(name)
        assert not is_remote(as_path(name))
    for name in ("s3://bucket/run", "az://x", "hf://org/model", "file:///tmp/x"):
        with pytest.raises(InputError, match=rf"{name}: {name[:2]}.*:// is not supported"):
            as_path(name)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"gs:// needs gcsfs, which is not installed: pip install"):
        as_path("gs://b")


def test_a_path_in_a_bucket_keeps_both_slashes(bucket):
    assert str(as_path(f"{bucket}/run") / "hf") == f"{bucket}/run/hf"
    # As it comes out of `pathlib`.
    assert as_path(Path(f"{bucket}/run")) == as_path(f"{bucket}/run")
    with pytest.raises(InputError, match=r"run: data\.sources cannot be in a bucket; copy it"):
        folder_of_this_machine(f"{bucket}/run", "data.sources")


def names(folder):
    return {path.name: path.read_text() for path in folder.iterdir()} if folder.exists() else {}


def test_a_folder_in_a_bucket_is_replaced_whole_or_counts_for_none(bucket, monkeypatch):
    folder = as_path(f"{bucket}/replaced")

    def replace(content, *more):
        with replacing(folder) as beside:
            for name in ("config.json", "a", "z", *more):
                (beside / name).write_text(content)

    replace("1", "left over")
    assert names(folder) == {"config.json": "1", "a": "1", "z": "1", "left over": "1"}
    with pytest.raises(TypeError):
        replace("2", None)
    assert names(folder)["a"] == "1"
    # Killed while it is copied: the file that makes it count is not there, before or behind it.
    copied, files = [], storage._files()
    copy = files.cp_file

    def dies(source, destination):
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


def test_a_file_in_a_bucket_is_written_whole(bucket):
    path = as_path(f"{bucket}/a.json")
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert path.read_text() == '{\n  "a": 1\n}\n'


def test_a_checkpoint_goes_to_a_bucket_and_back(bucket, tmp_path):
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


# --- storage that fails ----------------------------------------------------------------------

READING = 'Error reading "0000/.zarray" in OCDBT database at gs://bucket/4/default/'


def of_client(name):
    """An exception as packages of networks have them: of no type of Python's own."""
    return type("HttpError", (Exception,), {"__module__": name})("Service Unavailable, 503")


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ESTALE, "Stale file handle"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError("Forbidden: b/bucket/o"),  # gcsfs, of a 403
        ConnectionResetError("Connection reset by peer"),
        TimeoutError(),
        of_client("gcsfs.retry"),
        of_client("google.auth.exceptions"),
        of_client("aiohttp.client_exceptions"),
        ValueError(f"PERMISSION_DENIED: {READING}: Forbidden [http_response_code='403']"),
        ValueError(f"UNAVAILABLE: {READING}: CURL error Couldn't connect to server"),
        ValueError(f"DEADLINE_EXCEEDED: {READING}: All 32 retry attempts failed"),
        ValueError(f"UNKNOWN: {READING}: Failed to open: \"/4\" [os_error_code='5']"),
        ValueError(f"FAILED_PRECONDITION: {READING}: Failed to open: \"/4\" [os_error_code='116']"),
    ],
)
def test_what_the_storage_could_not_do_is_no_damage(error):
    assert is_of_storage(error)
    wrapped = Exception("Encountered error while reading array index")
    wrapped.__cause__ = error
    assert is_of_storage(wrapped)
    assert "Encountered" not in storage_message(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError("Metadata file (named _METADATA) does not exist"),
        NotADirectoryError(),
        IsADirectoryError(),
        json.JSONDecodeError("Expecting value", "", 0),
        ValueError(f"DATA_LOSS: {READING}: CRC-32C checksum verification failed"),
        ValueError(f"OUT_OF_RANGE: {READING}: Requested byte range [0, 7610) is not valid"),
        ValueError(f"FAILED_PRECONDITION: {READING}: Truncated Zstd-compressed stream"),
        ValueError(f"NOT_FOUND: {READING}: does not exist"),
        ValueError(f"NOT_FOUND: {READING}: Failed to open: \"/4\" [os_error_code='2']"),
        KeyError("0003"),
    ],
)
def test_what_is_missing_or_cannot_be_decoded_is_damage(error, tmp_path):
    assert not is_of_storage(error)

    def read():
        raise error

    with pytest.raises(type(error)):
        retried(tmp_path, read)


def test_what_was_not_seen_counts_as_missing_only_where_the_files_can_be_opened(
    tmp_path, monkeypatch, capsys
):
    """`Path.exists` says no of what it may not look at."""
    monkeypatch.setattr("wedlm_jax.host.storage.PAUSES_S", (0.0, 0.0))
    (tmp_path / "_METADATA").symlink_to("_METADATA")
    attempts = []

    def read():
        attempts.append(1)
        raise FileNotFoundError("Metadata file (named _METADATA) does not exist")

    with pytest.raises(StorageFailure, match=r"left as it is \(.*Too many levels of symbolic"):
        retried(tmp_path, read)
    assert len(attempts) == 3
    assert capsys.readouterr().err.count("; retrying in 0 s") == 2
    (tmp_path / "_METADATA").unlink()
    with pytest.raises(FileNotFoundError):
        retried(tmp_path, read)


def test_a_message_of_tensorstore_ends_where_its_description_of_the_array_begins():
    error = ValueError("UNAVAILABLE: Error reading gs://b/4: Gone [tensorstore_spec='{...}']")
    assert storage_message(error) == "UNAVAILABLE: Error reading gs://b/4: Gone"
    assert storage_message(ConnectionResetError()) == "ConnectionResetError"


# --- where a result cannot be written is said before the work ----------------------------


def test_a_file_in_a_folder_that_takes_one_is_fine(tmp_path):
    check_writable(tmp_path / "a.json")
    (tmp_path / "b.json").touch()
    check_writable(tmp_path / "b.json")
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"], "nothing is left"


def test_what_is_no_place_for_a_file_is_refused_at_once(tmp_path, monkeypatch):
    for name, sentence in (("", "is a folder; expected a file"), ("no/a", "no such folder to")):
        with pytest.raises(InputError, match=f"^--output {tmp_path / name}: {sentence}"):
            check_writable(tmp_path / name, "--output")

    def refused(**_):
        """A mount that is read only, or another user's: the tests' user may write anywhere."""
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    denied = r"a\.json: cannot be written \(Permission denied\)"
    with pytest.raises(InputError, match=rf"--trace .*{denied}"):
        check_trace(str(tmp_path / "a.json"), 1)
    with pytest.raises(InputError, match=rf"--answers .*{denied}"):
        check({"answers": str(tmp_path / "a.json")})
