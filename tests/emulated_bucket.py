"""A Google Cloud Storage bucket, `gs://bucket`, emulated here by `gcp-storage-emulator`."""

import contextlib
import functools
import http.server
import io
import math
import os
import re
import sys
import threading
import urllib.parse

import pytest


def variables(port):
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


def clients(host=0):
    """The same for a child, whose tensorstore asks for "/hostI/...", which the bucket can
    refuse."""
    own = {name: os.environ[name] for name in variables(0)}
    own["TENSORSTORE_GCS_HTTP_URL"] += f"/host{host}"
    return own


class Bucket(str):
    """The name of the bucket, and the requests that it shall refuse."""

    _refused = None

    @contextlib.contextmanager
    def refusing(self, request, status, times=math.inf):
        """Answers with ``status`` what matches a pattern of "PUT PATH?QUERY", at most ``times``
        times."""
        self._refused, self._status, self._times = re.compile(request), status, times
        try:
            yield
        finally:
            self._refused = None

    def refusal(self, request):
        """Returns the status with which a request is refused."""
        if self._refused is None or not self._times or not self._refused.search(request):
            return None
        self._times -= 1
        return self._status


@pytest.fixture(scope="session")
def bucket():
    """An empty bucket, told to every process that is started from here on."""
    pytest.importorskip("gcp_storage_emulator")
    bucket = Bucket("gs://bucket")
    server = _started(bucket)
    before = dict(os.environ)
    os.environ.update(variables(server.server_address[1]))
    pytest.importorskip("gcsfs")  # reads its variables when it is imported
    try:
        yield bucket
    finally:
        os.environ.clear()
        os.environ.update(before)
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    """One thread per connection; the emulator's own server refuses the sixth client."""

    request_queue_size = 128

    def handle_error(self, request, client_address):
        if not isinstance(sys.exception(), ConnectionError):  # a client that was killed
            super().handle_error(request, client_address)


def _started(bucket):
    from gcp_storage_emulator.handlers import buckets
    from gcp_storage_emulator.storage import Storage

    class InMemory(Storage):
        def _write_config_to_file(self):
            """Does not write all that there is as JSON at each change, as the emulator does."""

    storage = InMemory(use_memory_fs=True)
    buckets.create_bucket("bucket", storage)
    # What is deleted is gone; the emulator would keep it for a week.
    storage.buckets["bucket"]["softDeletePolicy"] = {"retentionDurationSeconds": 0}
    handler = functools.partial(_as_the_service(), storage, bucket, threading.Lock())
    server = _Server(("localhost", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _as_the_service():
    from gcp_storage_emulator.server import RequestHandler

    class AsTheService(RequestHandler):
        """Answers as Google's servers do where the emulator does otherwise: objects come with their
        generation, which requests may ask for; and one whose client died changes nothing."""

        def __init__(self, storage, bucket, lock, *arguments):
            self._bucket, self._lock, self._generation = bucket, lock, 0
            super().__init__(storage, *arguments)

        def _answer(self, answer):
            length = int(self.headers.get("Content-Length") or 0)
            if length:
                content = self.rfile.read(length)
                if len(content) < length:
                    self.close_connection = True
                    return
                self.rfile = io.BytesIO(content)
            with self._lock:
                refused = self._bucket.refusal(f"{self.command} {urllib.parse.unquote(self.path)}")
                self.path = re.sub(r"^/host\d+", "", self.path)
                self._generation = self._current_generation()
                status = refused or self._precondition()
                if status is None:
                    answer(self)
                    return
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _current_generation(self):
            """That of the object which the request names; 0 where there is none."""
            url = urllib.parse.urlsplit(self.path)
            match = re.search(r"/b/([^/]+)/o(?:/(.+))?$", url.path)
            if match is None:
                return 0
            [name] = urllib.parse.parse_qs(url.query).get("name", [""])
            name = urllib.parse.unquote(match[2]) if match[2] else name
            return int(self.storage.objects.get(match[1], {}).get(name, {}).get("generation", 0))

        def _precondition(self):
            query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
            for wanted in query.get("ifGenerationMatch", []):
                if int(wanted) != self._generation:
                    return 412
            for unwanted in query.get("ifGenerationNotMatch", []):
                if int(unwanted) == self._generation:
                    return 304 if self.command == "GET" else 412
            return None

        def end_headers(self):
            if self.command == "GET" and self._generation:
                self.send_header("x-goog-generation", str(self._generation))
            super().end_headers()

        do_GET = functools.partialmethod(_answer, RequestHandler.do_GET)
        do_POST = functools.partialmethod(_answer, RequestHandler.do_POST)
        do_PUT = functools.partialmethod(_answer, RequestHandler.do_PUT)
        do_PATCH = functools.partialmethod(_answer, RequestHandler.do_PATCH)
        do_DELETE = functools.partialmethod(_answer, RequestHandler.do_DELETE)

    return AsTheService
