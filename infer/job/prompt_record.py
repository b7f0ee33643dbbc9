"""Checks an input record: its fields, its id, its seed, and the prompt for the engine.

A record has either the form of `wedlm generate` or, as `BatchRecord`, the envelope of OpenAI's
batch files, and is then answered in the same form:

    {"custom_id": "q-17", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

The body is a request to `wedlm serve`, checked by the same code, and the answer is its response.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from wedlm_jax.errors import (
    InputError,
    nearest,
    refuse_unknown,
    require_extra,
    shortened,
    shown_value,
)
from wedlm_jax.messages import check_text
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.jsonl import parse_object

if TYPE_CHECKING:
    from infer.serve.shapes import LogprobShapes, TextShape
    from wedlm_jax.completion import Completion
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM
    from wedlm_jax.text import TextCodec

PROMPT_KINDS = ("prompt", "prompt_token_ids", "messages")
FOR_TEMPLATE = ("tools", "chat_template_kwargs")
KEYS = (*PROMPT_KINDS, "id", "sampling", "window_size", *FOR_TEMPLATE)
"""Keys of a record that are read, in JSONL and in Parquet; the output repeats all others."""

SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))

LIKE_A_KEY = 0.8
"""Similarity to a known key, from 0 to 1, above which an unknown key counts as misspelt."""

ENVELOPE = ("custom_id", "method", "url", "body")
"""Keys of a record in the form of OpenAI's batch files."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
NOT_IN_JOBS = ("stream", "stream_options", "return_trace")
"""Fields of a request that a job refuses, because its own options decide them."""

Content = bytes | dict[str, Any] | None
"""A line of JSONL, None if it is too long; or the non-null columns of a Parquet row."""

RecordId = str | int


def record_fields(content: Content) -> Mapping[str, Any]:
    """Returns a record as an object."""
    return content if isinstance(content, dict) else parse_object(content)


def record_id(fields: Mapping[str, Any], number: int) -> RecordId:
    """Returns the id of a record. Without one it is the record's number, which counts from 1;
    ``number`` counts from 0."""
    if is_envelope(fields):
        name = fields["custom_id"]
        if not isinstance(name, str):
            raise InputError(f"custom_id: expected a text, not {shown_value(name)}")
        return name
    name = fields.get("id", number + 1)
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise InputError(f"id: expected a text or an integer, not {shown_value(name)}")
    return name


def is_envelope(fields: Mapping[str, Any]) -> bool:
    """Returns whether a record has the form of OpenAI's batch files. In a record with a prompt,
    keys of these names are the user's own."""
    is_request = "custom_id" in fields and ("body" in fields or "url" in fields)
    return is_request and not any(kind in fields for kind in PROMPT_KINDS)


def extra_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keys of a record that are not read here; the output repeats them."""
    if is_envelope(fields):
        return {}
    return {key: value for key, value in fields.items() if key not in KEYS}


def hint_of(key: str) -> str:
    """Returns a hint for a key that looks misspelt; empty if there is none."""
    if key in SAMPLING_FIELDS:
        return f'{key!r} is read only within "sampling"'
    near = nearest(key, (*KEYS, *SAMPLING_FIELDS), LIKE_A_KEY)
    if near is None:
        return ""
    where = ' within "sampling"' if near in SAMPLING_FIELDS else ""
    return f"{key!r} is not read; did you mean {near!r}{where}?"


def prepared_record(
    llm: LLM, fields: Mapping[str, Any], params: SamplingParams, *, chat: bool
) -> Prepared | Windowed:
    """Returns the engine's input for a record.

    Args:
      params: sampling parameters, which its ``sampling`` may override.
      chat: whether a ``prompt`` is a user message, for the chat template.

    Raises:
      InputError: a field is wrong, or the model cannot decode the record; the message says which
        and why.
    """
    kinds = [kind for kind in PROMPT_KINDS if kind in fields]
    if len(kinds) != 1:
        have = " and ".join(kinds) or "none"
        near = [] if kinds else [key for key in fields if nearest(key, PROMPT_KINDS, LIKE_A_KEY)]
        hint = f"; {hint_of(near[0])}" if near else ""
        raise InputError(f"expected exactly one of {', '.join(PROMPT_KINDS)}, not {have}{hint}")
    kind = kinds[0]
    prompt = fields[kind]
    if kind == "prompt":
        check_text(prompt)
    elif kind == "prompt_token_ids" and not _is_list_of_integers(prompt):
        shown = shown_value(prompt)
        raise InputError(f"prompt_token_ids: expected a list of integers, not {shown}")
    if kind == "prompt" and chat:
        kind, prompt = "messages", [{"role": "user", "content": prompt}]
    template = {name: fields[name] for name in FOR_TEMPLATE if name in fields}
    if template and kind != "messages":
        name = next(iter(template))
        raise InputError(f"{name}: goes with messages, or with a prompt and --chat")
    window = fields.get("window_size")
    if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
        raise InputError(f"window_size: expected an integer, not {shown_value(window)}")
    if fields.get("sampling") is not None:
        params = _overridden(params, fields["sampling"])
    return _prepared(llm, prompt, params, window, template if kind == "messages" else None)


def _prepared(
    llm: LLM,
    prompt: Any,
    params: SamplingParams,
    window: int | None,
    template: Mapping[str, Any] | None,
) -> Prepared | Windowed:
    """Returns token ids and parameters, and the window if the record sets one. ``template`` has the
    arguments of `LLM.chat_prompt` other than the messages; it is None for any other prompt."""
    try:
        if template is not None:
            prompt = llm.chat_prompt(prompt, **template)
        token_ids, params = llm.prepare_one(prompt, params, many_samples=True)
    except InputError:
        raise
    except Exception as error:
        # Tokenizers and templates are third-party code: a record that breaks one must not end a job
        # of millions.
        reason = shortened(f"{type(error).__name__}: {error}")
        raise InputError(f"the prompt could not be turned into tokens ({reason})") from error
    ids = array("i", token_ids)  # a list would take nine times the memory
    if window is None:
        return ids, params
    llm.engine.check_window(window)
    return ids, params, window


def record_seed(seed: int, name: RecordId) -> int:
    """Derives a record's 32-bit seed from the job's seed and the record's id alone, so that its
    result does not depend on where it is decoded or with which others."""
    text = json.dumps([seed, name])
    return int.from_bytes(hashlib.sha256(text.encode("ascii")).digest()[:4], "big")


def _overridden(params: SamplingParams, fields: Any) -> SamplingParams:
    """Returns ``params`` with a record's own values; a null seed keeps that of ``params``."""
    if not isinstance(fields, dict):
        raise InputError(f"sampling: expected an object, not {shown_value(fields)}")
    if "window_size" in fields:
        raise InputError("window_size: expected next to sampling, not within it")
    refuse_unknown(fields, SAMPLING_FIELDS, "sampling field")
    try:
        given = dataclasses.replace(params, **fields)
    except InputError as error:
        raise InputError(f"sampling.{error}") from None
    return given if given.seed is not None else dataclasses.replace(given, seed=params.seed)


def _is_list_of_integers(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(item, int) and not isinstance(item, bool) for item in value
    )


@dataclasses.dataclass
class BatchRecord:
    """A request in its envelope, and the ``shape`` of its answer, which `prepare` sets."""

    fields: Mapping[str, Any]
    shape: TextShape | None = None

    def prepare(self, llm: LLM, params: SamplingParams) -> Prepared | Windowed:
        """Returns the engine's input for the request, as `prepared_record` does for a record."""
        from infer.serve.calls import Call
        from infer.serve.shapes import ChatShape, TextShape

        refuse_unknown(self.fields, ENVELOPE, "key")
        method, url = self.fields.get("method", "POST"), self.fields.get("url")
        if method != "POST":
            raise InputError(f"method: expected POST, not {shown_value(method)}")
        if url not in (CHAT, TEXT):
            raise InputError(f"url: expected {CHAT} or {TEXT}, not {shown_value(url)}")
        body, params = _read_body(self.fields.get("body"), url == CHAT, params)
        prompt: Any = body.messages if url == CHAT else body.prompt
        template: dict[str, Any] | None = None
        if url == CHAT:
            tools = None if body.tool_choice == "none" else body.tools
            template = {"tools": tools, "chat_template_kwargs": body.chat_template_kwargs}
        elif isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt):
            if len(prompt) != 1:
                raise InputError(f"prompt: expected one per record, not {len(prompt)}")
            prompt = prompt[0]
        prepared = _prepared(llm, prompt, params, body.window_size, template)
        call = Call(
            [(range(len(prepared[0])), prepared[1])], with_token_ids=bool(body.return_token_ids)
        )
        kind = ChatShape if url == CHAT else TextShape
        # A restart must give the same answer, so nothing in it may depend on the time.
        model, logprobs = body.model or llm.folder.name, _logprob_shapes(llm.codec)
        self.shape = kind(call, model, logprobs, identity=(self._id, 0))
        return prepared

    def result(self, completion: Completion) -> dict[str, Any]:
        """Returns the answer in its envelope."""
        from infer.serve.shapes import Piece
        from wedlm_jax.completion import Chunk

        assert self.shape is not None, "it was prepared"
        # The number of cached tokens depends on what else was decoded, and so on restarts.
        samples = [dataclasses.replace(one, num_cached_tokens=0) for one in completion.samples]
        pieces = [
            Piece(i, Chunk(one.text or "", one.token_ids, one)) for i, one in enumerate(samples)
        ]
        return self._answered(200, self.shape.whole(pieces))

    def error(self, reason: str) -> dict[str, Any]:
        """Returns an error in its envelope."""
        error = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
        return self._answered(400, {"error": error})

    def _answered(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": self._id, "body": body}
        ids = {"id": f"batch_req_{self._id}", "custom_id": self.fields["custom_id"]}
        return {**ids, "response": response, "error": None}

    @property
    def _id(self) -> str:
        text = json.dumps(self.fields["custom_id"], default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.lru_cache(maxsize=1)
def _logprob_shapes(codec: TextCodec | None) -> LogprobShapes:
    from infer.serve.shapes import LogprobShapes

    return LogprobShapes(codec)


def _read_body(given: Any, chat: bool, params: SamplingParams) -> tuple[Any, SamplingParams]:
    """Returns a request's body as the server reads it, and its sampling parameters."""
    if not isinstance(given, dict):
        raise InputError(f"body: expected an object, not {shown_value(given)}")
    require_extra("a record of OpenAI's batch form", "serve", "fastapi")
    from pydantic import ValidationError

    from infer.serve.errors import ApiError
    from infer.serve.fields import (
        ChatRequest,
        CompletionRequest,
        check_refused,
        error_of_fields,
        sampling_given,
        sampling_of,
    )

    for name in NOT_IN_JOBS:
        if given.get(name):
            raise InputError(f"{name}: not allowed in a job, whose own options decide it")
    try:
        body: Any = (ChatRequest if chat else CompletionRequest).model_validate(given)
        check_refused(body)
        sampling = sampling_given(body)
        if sampling.get("seed", 0) in (None, -1):
            del sampling["seed"]
        return body, sampling_of(sampling, params, params.max_tokens)
    except ValidationError as error:
        raise InputError(error_of_fields(error.errors(), "").message) from None
    except ApiError as error:
        raise InputError(error.message) from None


Extra: TypeAlias = Mapping[str, Any] | BatchRecord
"""What a result copies from its record: the extra keys, or the fields of a batch request."""
