"""Errors in the shape of OpenAI's API, which every answer with an error status has."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi.responses import JSONResponse

from wedlm_jax.errors import InputError

LOG = logging.getLogger("wedlm.serve")

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The API's ``type`` of a status; other 4xx are "invalid_request_error", 5xx "server_error"."""

PLACE = re.compile(r"\[(\d+)\]")
"""Of a list, in the library's sentences."""

CONTEXT_LENGTH = "context_length_exceeded"


class ApiError(Exception):
    """Ends a request with an error status.

    Attributes:
      status: HTTP status.
      message: one sentence for the caller.
      param: the field that is wrong, where it is one.
      code: the API's own name of the fault, where it has one.
      headers: to send with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """What is sent."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def bad_request(
    error: InputError, fields: Collection[str] = (), otherwise: str | None = None
) -> ApiError:
    """Returns the error answer to a request that the library refuses.

    Args:
      fields: with which its sentence may begin.
      otherwise: the field that is meant where it begins with none of them.
    """
    name, colon, _ = str(error).partition(":")
    if name.startswith("messages["):
        otherwise = PLACE.sub(r".\1", name)  # in the API's spelling
    return ApiError(400, str(error), param=name if colon and name in fields else otherwise)


def as_api_error(error: Exception) -> ApiError:
    """Returns the error answer to an exception that ended a request."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return bad_request(error)
    LOG.error("a request failed", exc_info=error)
    # What went wrong inside is for the log: it may hold others' texts.
    return ApiError(500, "the server failed on this request; its log says why")
