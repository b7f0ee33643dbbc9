"""Errors in the shape of OpenAI's API."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from fastapi.responses import JSONResponse

from wedlm_jax.errors import InputError

LOG = logging.getLogger("wedlm.serve")

KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
"""The API's ``type`` for a status; other 4xx are "invalid_request_error", 5xx "server_error"."""

CONTEXT_LENGTH = "context_length_exceeded"


class ApiError(Exception):
    """Ends a request with an error status.

    Attributes:
      message: one sentence for the caller.
      param: the bad field, if there is one.
      code: the API's own name of the error, if it has one.
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
        """The answer's JSON."""
        usual = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = KINDS.get(self.status, usual)
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def bad_field(field: str, message: str) -> ApiError:
    """Returns the answer to a request with a bad field."""
    return ApiError(400, f"{field}: {message}", param=field)


def bad_request(
    error: InputError, fields: Collection[str] = (), otherwise: str | None = None
) -> ApiError:
    """Returns the answer to a request that the library refuses.

    Args:
      fields: fields whose names the library's message may begin with.
      otherwise: the bad field if the message begins with none of them.
    """
    name, colon, _ = str(error).partition(":")
    if name.startswith("messages["):
        otherwise = re.sub(r"\[(\d+)\]", r".\1", name)  # as the API spells it
    return ApiError(400, str(error), param=name if colon and name in fields else otherwise)


def as_api_error(error: Exception) -> ApiError:
    """Returns the answer to a request that ended with an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, InputError):
        return bad_request(error)
    LOG.error("a request failed", exc_info=error)
    # Details are for the log alone: they may contain the texts of other requests.
    return ApiError(500, "the server failed on this request; its log says why")
