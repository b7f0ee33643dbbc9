"""`wedlm serve`: a model behind the OpenAI API."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from infer.flags import add_decoding_options, add_engine_options, sampling_params
from infer.generate import load
from infer.serve.settings import FILE, PREFIX, TABLE, layered
from wedlm_jax.errors import InputError
from wedlm_jax.host import notices
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import LOADING, NEXT_LINE_S, ticking
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from infer.serve.app import Service
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

DESCRIPTION = """\
Serves a model to programs that speak the OpenAI API: /v1/completions, /v1/chat/completions and
/v1/models, with /health and /metrics beside them, and a page on /.
"""

NOTES = f"""\
Decoding options hold for requests that do not give them.

Every option may also be an environment variable ({PREFIX}PORT=8080 is --port 8080), or a line of
the table [{TABLE}] in {FILE} (port = 8080), in the working directory or where --config says. Flags
override variables, and variables the file. The key is best given as {PREFIX}API_KEY: others on
this machine see command lines.

Ctrl-C or SIGTERM stops the server: it takes no more requests, and ends when the answers under way
are finished, or after --grace seconds.

examples:
  wedlm serve
  wedlm serve --model DIR --port 8080 --batch-size 64
  {PREFIX}API_KEY=secret wedlm serve --model DIR --host 0.0.0.0
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "Once upon a time", "max_tokens": 32}}'
"""

TAKEN_OTHERWISE = {
    "max_tokens": "the most tokens of a completion, fewer if the context has no room for them "
    "[256; of a chat's answer, all that there is room for]",
    "seed": "starts the random numbers of every request: the same request gets the same tokens "
    "[none: each request has a seed of its own]",
}
"""Help for sampling options that mean something else in the server than in other commands."""

GRACE, CLIENT_TIMEOUT = 20.0, 30.0

EMBEDDED_NAME = "wedlm-embedded"

LOG = logging.getLogger("wedlm.serve")
LINES = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""Format of log lines, as `logging.Formatter` takes it."""

NEEDED = "needs FastAPI, uvicorn and prometheus_client: pip install 'wedlm-jax[serve]'"


def parser() -> argparse.ArgumentParser:
    """Returns the parser. An option that is not given is absent from the result."""
    result = CommandParser(
        prog="wedlm serve",
        usage="wedlm serve [--model DIR] [--host HOST] [--port N] [options]",
        description=DESCRIPTION,
        epilog=NOTES,
        argument_default=argparse.SUPPRESS,
    )
    _add_server(result.add_argument_group("server"))
    _add_limits(result.add_argument_group("limits"))
    add_engine_options(result.add_argument_group("model"))
    decoding = result.add_argument_group("decoding, where a request does not say")
    add_decoding_options(decoding, TAKEN_OTHERWISE)
    return result


def _add_server(group: Any) -> None:
    add = group.add_argument
    add(
        "--host",
        metavar="HOST",
        help="address to listen at; 0.0.0.0 is all of the machine's [127.0.0.1]",
    )
    add("--port", type=int, metavar="N", help="port to listen at; 0 takes any that is free [8000]")
    shown = f"the model's name in the API [as --model; {EMBEDDED_NAME}]"
    add("--served-model-name", metavar="NAME", help=shown)
    add("--api-key", metavar="KEY", help="the key that callers must send [none]")
    add(
        "--cors-origin",
        nargs="+",
        action="extend",
        metavar="URL",
        help="sites whose pages may call the server from browsers; * is all [none]",
    )
    add(
        "--no-warmup",
        action="store_true",
        help="listen at once; the first requests then wait for the compiler",
    )
    add("--quiet", action="store_true", help="log no line for each request")
    add("--config", metavar="FILE", help=f"file of settings, see below [{FILE}, if it is there]")


def _add_limits(group: Any) -> None:
    add = group.add_argument
    add(
        "--max-waiting",
        type=int,
        metavar="N",
        help="how many completions may wait while others decode; requests for more get status 429 "
        "[1024]",
    )
    add("--max-body", type=int, metavar="N", help="the most bytes of a request [8388608]")
    add(
        "--client-timeout",
        type=float,
        metavar="X",
        help="seconds that a client may take to send a request, or leave an answer unread [30]",
    )
    add(
        "--burst-seconds",
        type=float,
        metavar="X",
        help="seconds of decoding after which new requests are let in and streams are sent their "
        "next piece [0.05]",
    )
    add("--grace", type=float, metavar="X", help="seconds after Ctrl-C or SIGTERM for answers [20]")


def main(arguments: list[str]) -> int:
    options = layered(parser(), arguments, os.environ)
    _check(options)
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise InputError(f"{NEEDED} ({error})") from None
    params = sampling_params(options)
    # Both before the model, whose warnings are lines of this log, and which may take minutes.
    logging.basicConfig(format=LINES)
    notices.log(LINES)
    LOG.setLevel(logging.INFO)
    with listening_socket(options.get("host", "127.0.0.1"), options.get("port", 8000)) as sock:
        return serve(make_service(load_warm(options), options, params), sock, options)


def _check(options: dict[str, Any]) -> None:
    for name in ("max_waiting", "max_body", "client_timeout", "burst_seconds", "grace"):
        flag = f"--{name.replace('_', '-')}"
        least = 0 if name == "max_waiting" else 1e-6
        if not options.get(name, 1) >= least:
            raise InputError(f"{flag}: expected a number above 0, not {options[name]!r}")
    if not 0 <= options.get("port", 0) < 2**16:
        raise InputError(f"--port: expected 0 to 65535, not {options['port']}")
    if options.get("n", 1) > 1:
        raise InputError("--n: requests say how many samples they want")
    if options.get("api_key", "x").strip() in ("",):
        raise InputError("--api-key: expected a key, not an empty text")


def load_warm(options: dict[str, Any]) -> LLM:
    """Loads the model and compiles two programs: a fast one for requests that ask for nothing
    special, and one for everything."""
    warm = not options.get("no_warmup", False)
    model = options.get("model", EMBEDDED_NAME)
    print(f"wedlm serve: loading {model}", file=sys.stderr, flush=True)
    llm = load(options)
    programs = llm.engine.device.programs
    programs.while_busy = logged
    if warm:
        started = time.monotonic()
        llm.warm_up(sampling_params(options), everything=True)
        LOG.info("%d programs in %.1f s", len(programs), time.monotonic() - started)
    return llm


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Logs what the server waits for, and how long that took."""
    started = due = time.monotonic()

    def tell(seconds: float) -> None:
        nonlocal due
        if started + seconds >= due:
            due += NEXT_LINE_S
            LOG.info("%s, %.0f s so far", what, seconds)

    with contextlib.nullcontext() if what == LOADING else ticking(tell):
        yield
    if (took := time.monotonic() - started) >= 1 or what != LOADING:
        LOG.info("%s took %.1f s", what, took)


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that has its address, and does not listen yet.

    Raises:
      InputError: the address cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except OSError:
            sock.close()
            raise
    except OSError as error:
        raise InputError(f"--host {host} --port {port}: {error.strerror or error}") from None
    return sock


def make_service(llm: LLM, options: dict[str, Any], params: SamplingParams) -> Service:
    """Makes the service that options describe."""
    from infer.serve.app import Options, Service

    # A seed is part of a request, unless the command line has one for all.
    params = params if "seed" in options else dataclasses.replace(params, seed=None)
    names = ("api_key", "max_waiting", "max_body", "burst_seconds")
    return Service(
        llm,
        Options(
            model=options.get("served_model_name", options.get("model", EMBEDDED_NAME)),
            defaults=params,
            chat_limit=options.get("max_tokens"),
            cors_origins=tuple(options.get("cors_origin", ())),
            body_seconds=options.get("client_timeout", CLIENT_TIMEOUT),
            **{name: options[name] for name in names if name in options},
        ),
    )


def serve(service: Service, sock: socket.socket, options: dict[str, Any]) -> int:
    """Answers until the process is asked to end."""
    from infer.serve.http_server import make_server
    from infer.serve.limits import REQUESTS

    if not options.get("quiet"):
        REQUESTS.setLevel(logging.INFO)
    host, port, *_ = sock.getsockname()
    shown = f"[{host}]" if ":" in host else host
    server = make_server(
        service,
        grace=options.get("grace", GRACE),
        client_timeout=options.get("client_timeout", CLIENT_TIMEOUT),
        on_ready=lambda: print(
            f"wedlm serve: {service.options.model} at http://{shown}:{port}/v1", flush=True
        ),
    )
    with StopRequest():  # uvicorn hands the signal on when it is done
        server.run(sockets=[sock])
    if service.engine.is_compiling:
        # XLA does not survive that the interpreter ends under it.
        sys.stdout.flush()
        os._exit(0)
    return 0
