"""What is an error of storage, and what is damage."""

import errno
import json

import pytest

from wedlm_jax.errors import StorageFailure
from wedlm_jax.host.storage import asked_again, is_of_storage, told

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
    assert "Encountered" not in told(wrapped)


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
        asked_again(tmp_path, read)


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
        asked_again(tmp_path, read)
    assert len(attempts) == 3
    assert capsys.readouterr().err.count("; asking again in 0 s") == 2
    (tmp_path / "_METADATA").unlink()
    with pytest.raises(FileNotFoundError):
        asked_again(tmp_path, read)


def test_a_message_of_tensorstore_ends_where_its_description_of_the_array_begins():
    error = ValueError("UNAVAILABLE: Error reading gs://b/4: Gone [tensorstore_spec='{...}']")
    assert told(error) == "UNAVAILABLE: Error reading gs://b/4: Gone"
    assert told(ConnectionResetError()) == "ConnectionResetError"
