"""The server as an ASGI application: its routes and its page."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException

from infer.serve.answer import Answer, EventStream, ending_with_client
from infer.serve.calls import Calls, Capacity
from infer.serve.errors import ApiError
from infer.serve.fields import ChatRequest, CompletionRequest, error_of_fields
from infer.serve.http_server import body_limits, key_check, outcomes
from infer.serve.metrics import Metrics
from infer.serve.served_engine import ServedEngine
from infer.serve.shapes import ChatShape, LogprobShapes, TextShape
from wedlm_jax import __version__
from wedlm_jax.errors import shortened
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM

DESCRIPTION = """Causal diffusion language models behind OpenAI's API. Sampling fields are described
in docs/sampling.md of wedlm-jax."""
ERROR: dict[int | str, dict[str, Any]] = {
    "default": {"description": 'An error: {"error": {"message", "type", "param", "code"}}'}
}
"""Describes errors; FastAPI would otherwise describe its own."""

PATHS = (
    "/",
    "/openapi.json",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/health",
    "/metrics",
)
CLIENT_GONE = 499
"""nginx's status for a client that closed its connection before the answer."""

UNREAD = "There was an error parsing the body"
"""FastAPI's message for a body that it cannot read at all; errors in JSON have their own."""

PAGE = Path(__file__).parent / "page"
SCRIPTS = ("trace.js", "stream.js", "strip.js", "map.js", "lane.js", "page.js")
"""Scripts of the page, in order: each uses those before it."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a server.

    Attributes:
      model: the model's name in the API.
      defaults: default sampling parameters.
      chat_limit: default ``max_tokens`` of chats; None for as many as fit into the context.
      api_key: the key that callers must send, or None.
      cors_origins: origins whose pages may call the server.
      max_waiting: maximum number of sequences that wait while others decode.
      max_body: maximum size of a request's body in bytes.
      body_seconds: maximum time until a request's body has arrived.
      burst_seconds: seconds of decoding after which new requests are admitted.
    """

    model: str
    defaults: SamplingParams = dataclasses.field(default_factory=lambda: SamplingParams(seed=None))
    chat_limit: int | None = None
    api_key: str | None = None
    cors_origins: tuple[str, ...] = ()
    max_waiting: int = 1024
    max_body: int = 8 * 2**20
    body_seconds: float = 30.0
    burst_seconds: float = 0.05


class Service:
    """A model behind the API. Only this service may step the model's engine."""

    def __init__(self, llm: LLM, options: Options):
        self.options, self._codec = options, llm.codec
        self.engine = ServedEngine(llm.engine)
        self.metrics = Metrics(self.engine)
        self._capacity = Capacity(llm.engine.settings.sequences, options.max_waiting)
        self.calls = Calls(llm, options.model, options.defaults, self._capacity, options.chat_limit)
        self._logprobs = LogprobShapes(llm.codec)
        self.card = {
            "id": options.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "wedlm-jax",
            "max_model_len": llm.engine.max_model_len,
        }

    async def answer(self, request: Request, body: Any, kind: type[TextShape]) -> Response:
        """Decodes what a body requests and sends it, whole or as a stream. Raises the cause of a
        failure if nothing has been sent yet."""
        call = await self.calls.read(body)
        shape = kind(call, self.options.model, self._logprobs)
        answer = Answer(
            call,
            self.engine,
            self._codec,
            self._capacity,
            self.metrics,
            burst_seconds=self.options.burst_seconds,
        )
        answer.begin()
        request.state.decoded = answer, shape.id  # for the log
        if call.streamed:
            return EventStream(answer, shape)
        async with ending_with_client(answer, request.receive) as gone:
            pieces = await answer.wholes()
            if gone.done():
                return Response(status_code=CLIENT_GONE)
            return JSONResponse(shape.whole(pieces))

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Runs the engine for as long as the server runs."""
        self.engine.start()
        try:
            yield
        finally:
            await asyncio.to_thread(self.engine.close)


def make_app(service: Service) -> FastAPI:
    """Returns the server as an ASGI application."""
    options = service.options
    app = FastAPI(
        title="wedlm serve",
        version=__version__,
        description=DESCRIPTION,
        lifespan=service.running,
        docs_url=None,  # FastAPI's documentation pages load scripts from elsewhere
        redoc_url=None,
    )
    app.add_middleware(body_limits, most=options.max_body, seconds=options.body_seconds)
    if options.api_key is not None:
        app.add_middleware(key_check, key=options.api_key)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(outcomes, metrics=service.metrics, paths=PATHS)
    _add_error_handlers(app)
    _add_routes(app, service)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Makes every error of ``app`` answer in the API's shape."""

    @app.exception_handler(ApiError)
    async def of_api(_: Request, error: ApiError) -> JSONResponse:
        return error.response

    @app.exception_handler(RequestValidationError)
    async def of_validation(_: Request, error: RequestValidationError) -> JSONResponse:
        return error_of_fields(error.errors()).response

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> JSONResponse:
        message = str(error.detail)
        if message == UNREAD:
            cause, reason = error.__cause__, shortened(str(error.__cause__))
            if isinstance(cause, UnicodeDecodeError):
                reason = "it is not UTF-8 text"
            elif isinstance(cause, RecursionError):
                reason = "it is nested too deeply"
            message = f"the body is not valid JSON ({reason})"
        if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
            message = f"{message}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response


def _add_routes(app: FastAPI, service: Service) -> None:
    def route(method: str, path: str) -> Any:
        # A plain `Response` leaves the description of answers without a type: some are streams.
        return app.api_route(path, methods=[method], responses=ERROR, response_class=Response)

    @route("POST", "/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:  # type: ignore[valid-type]
        """Completes a text, or several."""
        return await service.answer(request, body, TextShape)

    @route("POST", "/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:  # type: ignore[valid-type]
        """Answers a conversation, with the checkpoint's chat template."""
        return await service.answer(request, body, ChatShape)

    @route("GET", "/v1/models")
    async def models() -> Response:
        """Lists the served model."""
        return JSONResponse({"object": "list", "data": [service.card]})

    @route("GET", "/v1/models/{model:path}")
    async def model_card(model: str) -> Response:
        """Describes the model."""
        service.calls.check_model(model)
        return JSONResponse(service.card)

    @route("GET", "/health")
    async def health() -> Response:
        """Returns whether the engine can decode."""
        if service.engine.is_broken:
            raise ApiError(503, "the engine failed and could not be restarted")
        return JSONResponse({"status": "ok"})

    @route("GET", "/metrics")
    async def metrics() -> Response:
        """Returns the server's metrics, for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    html, policy = page()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        return HTMLResponse(html, headers=headers)


def page() -> tuple[str, str]:
    """Returns the page, which shows decoding forward by forward next to AR decoding, and its
    Content-Security-Policy, which allows only the page's own style and script and calls to this
    server."""

    def read(name: str) -> str:
        return (PAGE / name).read_text(encoding="utf-8")

    def digest(text: str) -> str:
        return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()

    style = read("style.css")
    script = '"use strict";\n' + "\n".join(map(read, SCRIPTS))
    html = read("index.html").replace("/* style */", style).replace("/* script */", script)
    policy = (
        f"default-src 'none'; style-src '{digest(style)}'; script-src '{digest(script)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return html, policy
