"""The fields of a request's body, built from the options of `SamplingParams`, and a body's errors.

Types and names are checked here; bounds and combinations by `SamplingParams`, where they are
defined. The API's description uses the same definitions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from infer.serve.errors import ApiError, bad_field, bad_request
from wedlm_jax.errors import InputError, did_you_mean
from wedlm_jax.option_values import UNBOUNDED, Option
from wedlm_jax.params import OPTIONS, SamplingParams

LISTS: Mapping[str, Any] = {
    "stop": StrictStr | list[StrictStr],
    "stop_token_ids": list[StrictInt],
    "logit_bias": dict[str, StrictFloat],
    "bad_words": list[StrictStr | list[StrictInt]],
    "json_schema": dict[str, Any],
}
"""Types of the fields that are not a number, a boolean or a text."""

IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "parallel_tool_calls",
)
"""OpenAI's fields that change nothing in an answer."""

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""OpenAI's fields that this server does not support, and the values that request nothing."""


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream sends in addition to its text."""

    include_usage: StrictBool = Field(False, description="send a last event with the token usage")
    include_obfuscation: StrictBool = Field(False, description="has no effect")


class NamedSchema(Body):
    """A JSON schema, as OpenAI wraps it."""

    name: StrictStr | None = None
    description: StrictStr | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: StrictBool | None = Field(None, description="has no effect: answers always follow it")


class ResponseFormat(Body):
    """The format of an answer's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _schema_where_it_says_so(self) -> Self:
        if self.type != "text" and (self.json_schema is None) == (self.type == "json_schema"):
            message = 'expected json_schema with "type": "json_schema" alone'
            raise PydanticCustomError("response_format", message)  # type: ignore[arg-type]
        return self


class StructuredOutputs(Body):
    """The format of an answer's text, as vLLM names it."""

    json_: dict[str, Any] | StrictStr | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: StrictStr | None = None


def _type_of(name: str, option: Option) -> Any:
    if option.low is not None:
        return StrictInt if option.integer else StrictFloat
    if option.flag:
        return StrictBool
    if option.choices:
        return Literal[option.choices]
    return LISTS.get(name, StrictStr) if option.text else LISTS[name]


def _schema_of(option: Option) -> dict[str, Any]:
    """Returns the bounds of an option for the API's description."""
    if option.low is None:
        return {}
    least = "exclusiveMinimum" if option.above else "minimum"
    most = {} if option.high == UNBOUNDED else {"maximum": option.high}
    return {least: option.low, **most}


def _sampling_fields(*left_out: str) -> dict[str, Any]:
    return {
        name: (
            _type_of(name, option) | None,
            Field(None, description=option.help, json_schema_extra=_schema_of(option)),
        )
        for name, option in OPTIONS.items()
        if name not in left_out
    }


def _optional(kind: Any, description: str) -> Any:
    return kind | None, Field(None, description=description)


def _shared_fields() -> dict[str, Any]:
    return {
        "model": _optional(StrictStr, "as /v1/models names it"),
        "stream": _optional(StrictBool, "send the answer as it comes, as server-sent events"),
        "stream_options": _optional(StreamOptions, "options of a stream"),
        "window_size": _optional(
            StrictInt, "W, masks decoded in parallel, at most the server's; 0 is autoregressive"
        ),
        "response_format": _optional(ResponseFormat, "format of the text: JSON, or a JSON schema"),
        "structured_outputs": _optional(StructuredOutputs, "the same, as vLLM names it"),
        "return_token_ids": _optional(StrictBool, "also send the ids of the answer's tokens"),
        "return_trace": _optional(
            StrictBool,
            "also send what every forward saw and did; all forwards are then sent one by one",
        ),
        **{name: _optional(Any, "has no effect here") for name in IGNORED},
        **{name: _optional(Any, "not supported") for name in REFUSED},
    }


PROMPTS = "a text, a list of token ids, a list of texts, or a list of lists of token ids"

CompletionRequest = create_model(
    "CompletionRequest",
    __base__=Body,
    __doc__="A text, or several, to complete.",
    prompt=(
        StrictStr | list[StrictInt] | list[StrictStr] | list[list[StrictInt]],
        Field(description=PROMPTS),
    ),
    **_sampling_fields(),
    **_shared_fields(),
)
ChatRequest = create_model(
    "ChatRequest",
    __base__=Body,
    __doc__="A conversation to answer.",
    messages=(
        list[dict[str, Any]],
        Field(
            min_length=1,
            description="each with a role and a content (a text or parts of one); an assistant's "
            "may have tool_calls and reasoning_content, a tool's may have tool_call_id",
        ),
    ),
    tools=_optional(
        list[dict[str, Any]], "functions that the model may call, for the chat template"
    ),
    tool_choice=_optional(Literal["none", "auto"], "none leaves the tools out of the template"),
    chat_template_kwargs=_optional(
        dict[str, Any], "variables of the chat template, such as enable_thinking"
    ),
    max_completion_tokens=_optional(StrictInt, "OpenAI's newer name for max_tokens"),
    logprobs=_optional(StrictBool, "return each token's log-probability"),
    top_logprobs=_optional(StrictInt, "also return this many of the most likely tokens per place"),
    **_sampling_fields("logprobs"),
    **_shared_fields(),
)


def sampling_given(body: BaseModel) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that a body gives. Null means "not given", except for
    fields with null as a value."""
    defaults = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    given = {name: getattr(body, name) for name in body.model_fields_set if name in OPTIONS}
    for name, field, value in _by_other_names(body):
        if given.get(field) is not None:
            raise bad_field(name, f"means the same as {field}, which is given too")
        given[field] = value
    if isinstance(body, ChatRequest):
        given.pop("logprobs", None)
        chat: Any = body
        try:
            OPTIONS["logprobs"].check("top_logprobs", chat.top_logprobs)
        except InputError as error:
            raise bad_request(error, ("top_logprobs",)) from None
        if chat.logprobs:
            given["logprobs"] = chat.top_logprobs or 0
        elif chat.top_logprobs:
            raise bad_field("top_logprobs", "expected logprobs to be true")
    return {
        name: value
        for name, value in given.items()
        if value is not None or (OPTIONS[name].none is not None and defaults[name] != ())
    }


def _by_other_names(body: Any) -> Iterator[tuple[str, str, Any]]:
    """Yields what a body gives under another API's name: that name, the field, and the value."""
    any_object = {"type": "object"}
    if (form := body.response_format) is not None and form.type != "text":
        schema = any_object if form.json_schema is None else form.json_schema.schema_
        yield "response_format", "json_schema", schema
    if (outputs := body.structured_outputs) is not None:
        if (schema := any_object if outputs.json_object else outputs.json_) is not None:
            yield "structured_outputs", "json_schema", schema
        if outputs.regex is not None:
            yield "structured_outputs", "regex", outputs.regex
    if (most := getattr(body, "max_completion_tokens", None)) is not None:
        yield "max_completion_tokens", "max_tokens", most


def name_given(body: Any, field: str | None) -> str | None:
    """Returns the name under which a body gives a field of `SamplingParams`."""
    return next((name for name, of, _ in _by_other_names(body) if of == field), field)


def check_refused(body: BaseModel) -> None:
    """Raises an `ApiError` if a field asks for something that this server does not support."""
    for name, neutral in REFUSED.items():
        value = getattr(body, name, None)
        if value is not None and value not in neutral:
            raise bad_field(name, "not supported by this server")


def sampling_of(given: Mapping[str, Any], defaults: SamplingParams, context: int) -> SamplingParams:
    """Returns the sampling parameters of a request: its own, and otherwise the server's defaults.
    ``max_tokens`` defaults to the whole context.

    Raises:
      ApiError: a field is bad; the error names it.
    """
    fields = {"max_tokens": context} | dict(given)
    if fields.get("n", 1) > 1 and "temperature" not in fields and defaults.temperature == 0:
        fields["temperature"] = 1.0  # as in OpenAI's API: at 0 all samples would be equal
    try:
        return dataclasses.replace(defaults, **fields)
    except InputError as error:
        raise bad_request(error, OPTIONS) from None


def error_of_fields(errors: Sequence[Mapping[str, Any]], root: str = "body") -> ApiError:
    """Returns the answer to pydantic's errors. It names the first bad field and, if that may have
    several types, what each expected.

    Args:
      root: the first part of each error's ``loc``; empty for none.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON ({first.get('ctx', {}).get('error')})")
    paths = [_path(error["loc"][bool(root) :]) for error in errors]
    path = paths[0]
    if not path:
        message = "expected a JSON object as the body, with Content-Type: application/json"
        return ApiError(400, message)
    if first["type"] == "extra_forbidden":
        known = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
        hint = did_you_mean(str(first["loc"][-1]), known)
        return ApiError(400, f"unknown field {path!r}; {hint}", param=path)
    if path.partition(".")[0] == "prompt" and first["type"] != "missing":
        # pydantic lists the errors of all four types.
        return bad_field("prompt", f"expected {PROMPTS}")
    reasons = [
        _sentence(error) for error, place in zip(errors, paths, strict=True) if place == path
    ]
    return bad_field(path, ", or ".join(dict.fromkeys(reasons)))


def _path(loc: Sequence[Any]) -> str:
    """Returns the name of a field: a ``loc`` without the names of types that pydantic tried."""
    types = ("str", "int", "float", "bool", "dict", "list")

    def is_field(part: str) -> bool:
        return part.replace("_", "").islower() and part.isidentifier() and part not in types

    return ".".join(str(part) for part in loc if isinstance(part, int) or is_field(part))


def _sentence(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return "required"
    message = str(error["msg"])
    return message[:1].lower() + message[1:]
