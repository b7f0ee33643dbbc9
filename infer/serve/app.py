"""The routes of the server."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import HTMLResponse, JSONResponse

from infer.serve import descriptions
from infer.serve.answer import Answer, Call
from infer.serve.calls import Calls
from infer.serve.capacity import Capacity
from infer.serve.errors import ApiError
from infer.serve.event_stream import EventStream
from infer.serve.fields import ChatRequest, CompletionRequest
from infer.serve.limits import BodyLimits, Decoded, KeyCheck, Outcomes
from infer.serve.logprob_shapes import LogprobShapes
from infer.serve.metrics import Metrics
from infer.serve.page import document
from infer.serve.served_engine import ServedEngine
from infer.serve.shapes import ChatShape, TextShape
from infer.serve.validation import add_error_answers
from wedlm_jax import __version__
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from wedlm_jax.llm import LLM

T = TypeVar("T")

PATHS = (
    "/",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    "/v1/completions",
    "/v1/chat/completions",
)
CLIENT_GONE = 499
"""nginx's status of an answer that nobody hears."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Settings of a server.

    Attributes:
      model: the name that requests know it by.
      defaults: default sampling options.
      chat_limit: completion tokens of a chat that says nothing of them; None for the context.
      api_key: that callers must have; None for none.
      cors_origins: origins whose pages may call; none by default.
      max_waiting: most sequences that wait while others decode.
      max_body: bytes of a request.
      body_seconds: until all of a request's body is there.
      burst_seconds: seconds of decoding between two looks at new requests.
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
    """A model behind the API.

    Args:
      llm: whose engine nobody else steps.
    """

    def __init__(self, llm: LLM, options: Options):
        self.options, self._codec = options, llm.codec
        self.engine = ServedEngine(llm.engine)
        self.metrics = Metrics(lambda: self.engine.status)
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

    async def answer(self, request: Request, call: Call, kind: type[TextShape]) -> Response:
        """Decodes what a call asks for and sends it, whole or as it comes.

        Raises:
          Exception: what it failed with, where nothing was sent yet.
        """
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
        request.state.decoded = Decoded(shape.id, answer)
        self.metrics.prompt_tokens.inc(answer.num_prompt_tokens)
        if call.streamed:
            return EventStream(answer, shape, self.metrics.errors.inc)
        try:
            pieces = await _unless_gone(request, answer.wholes())
        finally:
            answer.end()
        if pieces is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(shape.whole(pieces))

    @contextlib.asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        """Runs the engine for as long as the server runs."""
        self.engine.start()
        notes = asyncio.create_task(self._note_totals())
        try:
            yield
        finally:
            notes.cancel()
            await asyncio.to_thread(self.engine.close)

    async def _note_totals(self) -> None:
        while True:
            self.metrics.note_totals()
            await asyncio.sleep(1)


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """Waits for ``work``; returns None as soon as the client is gone."""
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_client_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        task.cancel()
        gone.cancel()


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(service: Service) -> FastAPI:
    """Returns the server as an ASGI application."""
    options = service.options
    # Its own pages of documentation would load scripts from elsewhere.
    app = FastAPI(
        title="wedlm serve",
        version=__version__,
        description=descriptions.API,
        lifespan=service.running,
        docs_url=None,
        redoc_url=None,
    )
    app.add_middleware(BodyLimits, most=options.max_body, seconds=options.body_seconds)
    if options.api_key is not None:
        app.add_middleware(KeyCheck, key=options.api_key)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    app.add_middleware(Outcomes, metrics=service.metrics, paths=PATHS)
    add_error_answers(app)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions", responses=descriptions.TEXT)
    async def completions(body: CompletionRequest, request: Request) -> Response:  # type: ignore[valid-type]
        """Completes a text, or several."""
        return await service.answer(request, await service.calls.of_completion(body), TextShape)

    @app.post("/v1/chat/completions", responses=descriptions.CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:  # type: ignore[valid-type]
        """Answers a conversation, through the checkpoint's chat template."""
        return await service.answer(request, await service.calls.of_chat(body), ChatShape)

    @app.get("/v1/models", responses=descriptions.MODELS)
    async def models() -> Response:
        """Lists the one model."""
        return JSONResponse({"object": "list", "data": [service.card]})

    @app.get("/v1/models/{model:path}", responses=descriptions.MODEL)
    async def model_card(model: str) -> Response:
        """Describes the model."""
        if model != service.card["id"]:
            message = f"there is no model {model!r} here, but {service.card['id']!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return JSONResponse(service.card)

    @app.get("/health", responses=descriptions.HEALTH)
    async def health() -> Response:
        """Returns whether the engine can decode."""
        if service.engine.status.broken:
            raise ApiError(503, "the engine failed and could not be restarted")
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", response_class=Response, responses=descriptions.METRICS)
    async def metrics() -> Response:
        """Returns the server's metrics, for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    html, policy = document()
    headers = {"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"}

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(html, headers=headers)
