"""A bucket of Google Cloud Storage on this machine, for the tests: `gs://bucket`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


def variables(port: int) -> dict[str, str]:
    """What makes each client of a process ask the emulator: gcsfs and orbax's own, tensorstore."""
    address = f"http://localhost:{port}"
    return {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        # Nobody looks for credentials elsewhere.
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "NO_GCE_CHECK": "true",
    }


def clients() -> dict[str, str]:
    """The same of this process, for one that it starts."""
    return {name: os.environ[name] for name in variables(0)}


@pytest.fixture(scope="session")
def bucket() -> Iterator[str]:
    """An empty bucket, told to every process that is started from here on."""
    server = pytest.importorskip("gcp_storage_emulator.server")
    emulator = server.create_server("localhost", 0, in_memory=True, default_bucket="bucket")
    emulator.start()
    before = dict(os.environ)
    os.environ.update(variables(emulator._api._httpd.socket.getsockname()[1]))
    pytest.importorskip("gcsfs")  # reads its variables when it is imported
    try:
        yield "gs://bucket"
    finally:
        os.environ.clear()
        os.environ.update(before)
        emulator.stop()
