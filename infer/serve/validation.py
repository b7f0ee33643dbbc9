"""Errors of FastAPI and Starlette in the shape of OpenAI's API: what is wrong with a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from infer.serve.errors import ApiError
from infer.serve.fields import PROMPTS, ChatRequest, CompletionRequest
from wedlm_jax.errors import did_you_mean, shortened

KNOWN_FIELDS = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
UNREAD = "There was an error parsing the body"
"""FastAPI's message for a body that it cannot read at all; mistakes in JSON have their own."""


def add_error_answers(app: FastAPI) -> None:
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
            message = f"the body is not valid JSON ({_reason(error.__cause__)})"
        if error.status_code in (404, 405) and message == HTTPStatus(error.status_code).phrase:
            message = f"{message}: {request.method} {request.url.path}"
        return ApiError(error.status_code, message, headers=error.headers).response


def _reason(error: BaseException | None) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return shortened(str(error))


def error_of_fields(errors: Sequence[Mapping[str, Any]], root: str = "body") -> ApiError:
    """Returns the error of the first field that is wrong; a field of several types lists what each
    expected.

    Args:
      root: with which the places of errors begin; empty for nothing.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first.get('ctx', {}).get('error')})")
    skipped = len([root] if root else [])
    path = _path(first["loc"][skipped:])
    if not path:
        return ApiError(
            400, "expected a JSON object as the body, with Content-Type: application/json"
        )
    if first["type"] == "extra_forbidden":
        *_, name = first["loc"]
        hint = did_you_mean(str(name), KNOWN_FIELDS)
        return ApiError(400, f"unknown field {path!r}; {hint}", param=path)
    if path.partition(".")[0] == "prompt" and first["type"] != "missing":
        # Each of the four kinds would say what it misses.
        return ApiError(400, f"prompt: expected {PROMPTS}", param="prompt")
    said = [_sentence(error) for error in errors if _path(error["loc"][skipped:]) == path]
    return ApiError(400, f"{path}: {', or '.join(dict.fromkeys(said))}", param=path)


def _path(loc: Sequence[Any]) -> str:
    """Returns the name of a field, without the names of the types that were tried."""
    names = [part for part in loc if isinstance(part, int) or _is_field(part)]
    return ".".join(map(str, names))


def _is_field(part: str) -> bool:
    types = ("str", "int", "float", "bool", "dict", "list")
    return part.replace("_", "").islower() and part.isidentifier() and part not in types


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "required"
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
