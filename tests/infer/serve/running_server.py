"""A server in a thread of the test's process."""

import contextlib
import socket
import threading
import time

from infer.serve.app import Options, Service, make_app
from infer.serve.command import listening_socket
from infer.serve.http_server import make_server

MODEL = "the-model"


def wait_until(holds, seconds=20, what="it does not come to hold"):
    """Waits until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


class RunningServer:
    """What a test needs of a server.

    Attributes:
      port, url: where it listens.
      service: behind it.
    """

    def __init__(self, port, service):
        self.port, self.service = port, service
        self.url = f"http://127.0.0.1:{port}"

    def wait_until_idle(self):
        """Waits until nothing is under way, and asserts that no page is held."""
        engine = self.service.engine

        def idle():
            now = engine.counters
            return now.running == now.waiting == now.pages_used == 0 and not engine.is_busy

        wait_until(idle)


@contextlib.contextmanager
def running_server(llm, *, grace=10, client_timeout=10, send_buffer=None, **options):
    """Serves ``llm`` at a free port of the loopback.

    Args:
      send_buffer: bytes that the system keeps for a client that does not read.
    """
    service = Service(llm, Options(MODEL, **options))
    ready = threading.Event()
    server = make_server(
        make_app(service), grace=grace, client_timeout=client_timeout, on_ready=ready.set
    )
    with listening_socket("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        if send_buffer is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert ready.wait(30), "the server does not listen"
            yield RunningServer(port, service)
        finally:
            server.should_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server does not end"
