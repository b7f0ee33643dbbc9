"""uvicorn over one socket."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import uvicorn

from infer.serve.app import make_app
from infer.serve.connection import patient_protocol
from wedlm_jax.errors import counted

if TYPE_CHECKING:
    from infer.serve.app import Service

LOG = logging.getLogger("wedlm.serve")


def make_server(
    service: Service,
    *,
    grace: float,
    client_timeout: float,
    on_ready: Callable[[], None] = lambda: None,
) -> uvicorn.Server:
    """Returns a server whose ``run(sockets=[...])`` answers until SIGTERM or Ctrl-C, and then until
    the answers under way are finished.

    Args:
      grace: seconds after which answers are cut off.
      client_timeout: seconds for the head of a request, and that an answer may stay unread.
      on_ready: called once connections are taken.
    """
    config = uvicorn.Config(
        make_app(service),
        http=patient_protocol(client_timeout, client_timeout),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,  # `infer.serve.limits.Outcomes` has more to say
        server_header=False,
        timeout_graceful_shutdown=grace,  # type: ignore[arg-type]
    )
    return _Server(config, on_ready)


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_ready: Callable[[], None]):
        super().__init__(config)
        self._on_ready = on_ready

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if under_way := len(self.server_state.tasks):
            LOG.info(
                "ending: %s under way, for at most %g s more",
                counted(under_way, "answer"),
                self.config.timeout_graceful_shutdown,
            )
        await super().shutdown(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()
