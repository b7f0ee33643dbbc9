"""`wedlm serve`: reads its settings, loads a model and serves it.

Flags override environment variables.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import logging
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from infer.flags import add_decoding_options, add_engine_options, adders, sampling_params
from infer.generate import load
from wedlm_jax.errors import InputError, did_you_mean, require_extra
from wedlm_jax.host import notices
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import LOADING, NEXT_LINE_S, ticking
from wedlm_jax.host.signals import StopRequest

if TYPE_CHECKING:
    from infer.serve.app import Service
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

PREFIX = "WEDLM_"
"""Prefix of the environment variables of settings."""

LONG_S = 1.0
"""Seconds after which a wait is logged."""

TRUTHS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}

DESCRIPTION = """\
Serves a model over the OpenAI API: /v1/completions, /v1/chat/completions and /v1/models; also
/health, /metrics, and a page at /.
"""

NOTES = f"""\
Decoding options are the defaults of requests that do not set them.

Every option can also be set by an environment variable ({PREFIX}PORT=8080 is --port 8080). Flags
override variables. Prefer {PREFIX}API_KEY for the key: other users of this machine can see command
lines.

Ctrl-C or SIGTERM stops the server: it accepts no more requests, and ends when running answers are
finished, or after --grace seconds.

examples:
  wedlm serve
  wedlm serve --model DIR --port 8080 --batch-size 64
  {PREFIX}API_KEY=secret wedlm serve --model DIR --host 0.0.0.0
  curl localhost:8000/v1/completions -H 'Content-Type: application/json' \\
    -d '{{"prompt": "Once upon a time", "max_tokens": 32}}'
"""

TAKEN_OTHERWISE = {
    "max_tokens": "maximum tokens of a completion, fewer if the context has no room for them "
    "[256; of a chat's answer, as many as fit]",
    "seed": "random seed of every request: the same request gets the same tokens "
    "[none: each request gets its own seed]",
}
"""Help of sampling options that mean something else in other commands."""

GRACE, CLIENT_TIMEOUT = 20.0, 30.0
EMBEDDED_NAME = "wedlm-embedded"

LOG = logging.getLogger("wedlm.serve")
LINES = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def parser() -> argparse.ArgumentParser:
    """Returns the parser. Its result contains only the given options."""
    result = CommandParser(
        prog="wedlm serve",
        usage="wedlm serve [--model DIR] [--host HOST] [--port N] [options]",
        description=DESCRIPTION,
        epilog=NOTES,
        argument_default=argparse.SUPPRESS,
    )
    add, switch = adders(result.add_argument_group("server"))
    add(
        "--host",
        "HOST",
        "address to listen on; 0.0.0.0 means all addresses of the machine [127.0.0.1]",
    )
    add("--port", "N", "port to listen on; 0 takes any free port [8000]")
    add("--served-model-name", "NAME", f"the model's name in the API [as --model; {EMBEDDED_NAME}]")
    add("--api-key", "KEY", "key that callers must send [none]")
    add(
        "--cors-origin",
        "URL",
        "sites whose pages may call the server from browsers; * allows all [none]",
        nargs="+",
        action="extend",
    )
    switch("--no-warmup", "listen at once; the first requests then wait for the compiler")
    switch("--quiet", "do not log a line per request")
    add, _ = adders(result.add_argument_group("limits"))
    add(
        "--max-waiting",
        "N",
        "number of completions that may wait while others decode; requests for more get "
        "status 429 [1024]",
    )
    add("--max-body", "N", "maximum bytes of a request [8388608]")
    add(
        "--client-timeout",
        "X",
        "seconds that a client may take to send a request or leave an answer unread [30]",
    )
    add(
        "--burst-seconds",
        "X",
        "seconds of decoding after which new requests are admitted and streams get their next "
        "piece [0.05]",
    )
    add("--grace", "X", "seconds in which running answers may finish after Ctrl-C or SIGTERM [20]")
    add_engine_options(result.add_argument_group("model"))
    decoding = result.add_argument_group("decoding, where a request does not set it")
    add_decoding_options(decoding, TAKEN_OTHERWISE)
    return result


def main(arguments: list[str]) -> int:
    options = layered(parser(), arguments, os.environ)
    _check(options)
    require_extra("the server", "serve", "fastapi", "prometheus_client", "uvicorn")
    params = sampling_params(options)
    # Both before loading the model, which may take minutes and whose warnings go to this log.
    logging.basicConfig(format=LINES)
    notices.log(LINES)
    LOG.setLevel(logging.INFO)
    with listening_socket(options.get("host", "127.0.0.1"), options.get("port", 8000)) as sock:
        return serve(make_service(load_warm(options), options, params), sock, options)


def _check(options: dict[str, Any]) -> None:
    for name in ("max_body", "client_timeout", "burst_seconds", "grace"):
        if not options.get(name, 1) > 0:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag}: expected a number above 0, not {options[name]!r}")
    if options.get("max_waiting", 0) < 0:
        raise InputError(f"--max-waiting: expected 0 or more, not {options['max_waiting']}")
    if not 0 <= options.get("port", 0) < 2**16:
        raise InputError(f"--port: expected 0 to 65535, not {options['port']}")
    if options.get("n", 1) > 1:
        raise InputError("--n: each request sets its own number of samples")
    if not options.get("api_key", "x").strip():
        raise InputError("--api-key: expected a key, not an empty text")


def load_warm(options: dict[str, Any]) -> LLM:
    """Loads the model and compiles its two programs, see `infer.serve.served_engine`."""
    model = options.get("model", EMBEDDED_NAME)
    print(f"wedlm serve: loading {model}", file=sys.stderr, flush=True)
    llm = load(options)
    programs = llm.engine.device.programs
    programs.while_busy = logged
    if not options.get("no_warmup"):
        started = time.monotonic()
        llm.warm_up(sampling_params(options), everything=True)
        LOG.info("%d programs in %.1f s", len(programs), time.monotonic() - started)
    return llm


@contextlib.contextmanager
def logged(what: str) -> Iterator[None]:
    """Logs what the server waits for and how long it took, if longer than `LONG_S`."""
    started = time.monotonic()
    due = started + LONG_S

    def tell(seconds: float) -> None:
        nonlocal due
        if started + seconds >= due:
            due += NEXT_LINE_S
            LOG.info("%s, %.0f s so far", what, seconds)

    with contextlib.nullcontext() if what == LOADING else ticking(tell):
        yield
    if (took := time.monotonic() - started) >= LONG_S:
        LOG.info("%s took %.1f s", what, took)


def listening_socket(host: str, port: int) -> socket.socket:
    """Returns a socket that is bound to an address but not listening yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, address = found[0]
        # asyncio sends small pieces at once (TCP_NODELAY) only if the socket names its protocol.
        # Otherwise a piece of a stream waits for the client to acknowledge the last, up to 40 ms.
        sock = socket.socket(family, kind, protocol)
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
    """Returns the service that options describe."""
    from infer.serve.app import Options, Service

    # Each request gets its own seed, unless the settings set one for all.
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
    """Answers requests until the process is asked to stop."""
    from infer.serve.app import make_app
    from infer.serve.http_server import REQUESTS, make_server

    if options.get("quiet"):
        REQUESTS.setLevel(logging.WARNING)
    host, port, *_ = sock.getsockname()
    shown = f"[{host}]" if ":" in host else host
    server = make_server(
        make_app(service),
        grace=options.get("grace", GRACE),
        client_timeout=options.get("client_timeout", CLIENT_TIMEOUT),
        on_ready=lambda: print(
            f"wedlm serve: {service.options.model} at http://{shown}:{port}/v1", flush=True
        ),
    )
    with StopRequest():  # uvicorn passes the signal on when it is done
        server.run(sockets=[sock])
    if service.engine.programs.is_compiling:
        # XLA crashes if the interpreter ends while it compiles.
        sys.stdout.flush()
        os._exit(0)
    return 0


# --- settings ----------------------------------------------------------------------------


def layered(
    parser: argparse.ArgumentParser, arguments: Sequence[str], environment: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the settings that flags and environment variables give.

    Args:
      parser: parser of the flags; its result contains only those given.
      environment: environment variables; ``WEDLM_PORT`` is ``--port``.

    Raises:
      InputError: a value is bad; the message names the variable.
    """
    flags = vars(parser.parse_args(arguments))
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    settings = {}
    for variable, text in environment.items():
        if not variable.startswith(PREFIX):
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in actions:
            settings[name] = _read(variable, actions[name], text)
        else:
            hint = did_you_mean(name, actions)
            print(
                f"wedlm serve: {variable} is ignored, as no setting has this name; {hint}",
                file=sys.stderr,
            )
    return settings | flags


def _read(variable: str, action: argparse.Action, text: str) -> Any:
    """Parses a value as its flag would."""
    if action.nargs == 0:
        truth = TRUTHS.get(text.lower())
        if truth is None:
            raise InputError(f"{variable}: expected true or false, not {text!r}")
        return truth
    try:
        values = shlex.split(text) if action.nargs == "+" else [text]
    except ValueError as error:
        raise InputError(f"{variable}: {text!r} is not a list of values ({error})") from None
    reader = _Reader(variable)
    named = {name: getattr(action, name) for name in ("nargs", "type", "choices")}
    reader.add_argument("value", **{k: v for k, v in named.items() if v is not None})
    return reader.parse_args(["--", *values]).value


class _Reader(CommandParser):
    """Parses one value; its errors name the variable."""

    def __init__(self, variable: str):
        super().__init__(add_help=False)
        self._variable = variable

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{self._variable}: {message.removeprefix('argument value: ')}")
