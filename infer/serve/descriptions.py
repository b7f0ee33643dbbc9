"""What answers look like, for the server's own OpenAPI description."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

API = """Causal diffusion language models behind OpenAI's API. Sampling fields mean what
docs/sampling.md of wedlm-jax says."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Describes the body of every answer with an error status."""

    error: ErrorDetail


class TokenDetails(BaseModel):
    cached_tokens: int


class DraftCounts(BaseModel):
    """Drafts that were checked, by where they came from, and those that were accepted."""

    masks: int
    masks_accepted: int
    lookup: int
    lookup_accepted: int


class Usage(BaseModel):
    """Tokens of all prompts and completions; forwards and window slots that decoding took, and its
    drafts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: TokenDetails
    num_forwards: int
    num_token_instances: int
    drafts: DraftCounts


class Answered(BaseModel):
    id: str
    created: int
    model: str
    system_fingerprint: None
    usage: Usage


class TextLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    trace: dict[str, Any] | None = None


class TextCompletion(Answered):
    object: Literal["text_completion"]
    choices: list[TextChoice]


class Alternative(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatToken(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(BaseModel):
    content: list[ChatToken]
    refusal: None


class AnswerMessage(BaseModel):
    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] | None = None
    trace: dict[str, Any] | None = None


class ChatCompletion(Answered):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"]
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["ok"]


Responses = dict[int | str, dict[str, Any]]

_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
"""The schema of each event of a stream: its data is JSON, or ``[DONE]``."""
_STREAM = {"text/event-stream": {"schema": _EVENT}}


def _of(model: type[BaseModel], **content: Any) -> Responses:
    return {200: {"model": model, **content}, "default": {"model": Error}}


TEXT, CHAT = _of(TextCompletion, content=_STREAM), _of(ChatCompletion, content=_STREAM)
MODELS, MODEL, HEALTH = _of(ModelList), _of(ModelCard), _of(Health)
METRICS: Responses = {
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
    "default": {"model": Error},
}
