"""A request's fields follow from those of `SamplingParams`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from pydantic import ValidationError

from infer.serve.errors import ApiError
from infer.serve.fields import (
    IGNORED,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    check_refused,
    sampling_given,
    sampling_of,
)
from wedlm_jax.params import OPTIONS, SamplingParams

DEFAULTS = SamplingParams(seed=None)
MESSAGES = [{"role": "user", "content": "x"}]


def params_of(**fields: Any) -> SamplingParams:
    body = CompletionRequest(prompt="x", **fields)
    return sampling_of(sampling_given(body), DEFAULTS, 1000)


def chat_params_of(**fields: Any) -> SamplingParams:
    body = ChatRequest(messages=MESSAGES, **fields)
    return sampling_of(sampling_given(body), DEFAULTS, 1000)


def test_every_field_of_sampling_is_a_field_of_both() -> None:
    for model in (CompletionRequest, ChatRequest):
        assert set(OPTIONS) <= set(model.model_fields)
        schema = model.model_json_schema()["properties"]
        for name, option in OPTIONS.items():
            if (model, name) != (ChatRequest, "logprobs"):
                assert schema[name]["description"] == option.help
                least = "exclusiveMinimum" if option.above else "minimum"
                assert schema[name].get(least) == option.low


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 1),
        ("temperature", 0.5),
        ("top_k", -1),
        ("stop", "x"),
        ("stop", ["x", "y"]),
        ("stop_token_ids", [1, 2]),
        ("logit_bias", {"5": 3, "6": -2.5}),
        ("bad_words", ["a", [1, 2]]),
        ("ignore_eos", True),
        ("mode", "paper"),
        ("entropy_threshold", None),
        ("entropy_threshold", 0.2),
        ("logprobs", 0),
        ("seed", 7),
        ("json_schema", {"type": "object"}),
        ("regex", "a+"),
    ],
)
def test_a_value_means_what_it_means_to_sampling_params(field: str, value: Any) -> None:
    expected = SamplingParams(**{"seed": None, "max_tokens": 1000, field: value})
    assert params_of(**{field: value}) == expected
    if field != "logprobs":
        assert chat_params_of(**{field: value}) == expected


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "entropy_threshold"])
def test_null_is_the_default(name: str) -> None:
    assert params_of(**{name: None}) == params_of()


def test_defaults_are_the_server_s() -> None:
    given = sampling_given(CompletionRequest(prompt="x", top_k=3))
    params = sampling_of(given, SamplingParams(temperature=0.7, seed=3, mode="paper"), 50)
    assert params == SamplingParams(temperature=0.7, seed=3, mode="paper", top_k=3, max_tokens=50)


def test_samples_without_a_temperature_get_openai_s() -> None:
    assert params_of(n=3).temperature == 1
    assert params_of(n=3, temperature=0.2).temperature == 0.2
    with pytest.raises(ApiError, match="n: expected 1 at temperature 0"):
        params_of(n=3, temperature=0)


SCHEMA = {"type": "array", "items": {"type": "integer"}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"json_schema": {"type": "object"}}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "numbers", "strict": True, "schema": SCHEMA},
                }
            },
            {"json_schema": SCHEMA},
        ),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"structured_outputs": {"json": '{"type": "array"}'}}, {"json_schema": {"type": "array"}}),
        ({"structured_outputs": {"json_object": True}}, {"json_schema": {"type": "object"}}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ],
)
def test_formats_by_the_names_of_others(fields: Any, expected: Any) -> None:
    wanted = SamplingParams(seed=None, max_tokens=1000, **expected)
    assert params_of(**fields) == chat_params_of(**fields) == wanted


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format: expected json_schema"),
        (
            {"response_format": {"type": "json_object"}, "json_schema": SCHEMA},
            "response_format: it says the same as json_schema",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex: expected none"),
        ({"structured_outputs": {"json": SCHEMA}, "mode": "paper"}, "json_schema: expected mode"),
        ({"regex": "a", "min_tokens": 3}, "min_tokens: expected none beside regex"),
    ],
)
def test_formats_that_cannot_be_are_named(fields: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as refused:
        params_of(**fields)
    assert (refused.value.status, refused.value.param) == (400, message.partition(":")[0])


def test_names_of_a_chat() -> None:
    assert chat_params_of(max_completion_tokens=7).max_tokens == 7
    assert chat_params_of(logprobs=True).logprobs == 0
    assert chat_params_of(logprobs=True, top_logprobs=4).logprobs == 4
    assert chat_params_of(logprobs=False).logprobs is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_may_be_given_if_it_asks_for_nothing(name: str) -> None:
    for value in (None, *REFUSED[name]):
        check_refused(ChatRequest(messages=MESSAGES, **{name: value}))
    with pytest.raises(ApiError, match=f"{name}: not supported") as refused:
        check_refused(ChatRequest(messages=MESSAGES, **{name: {"type": "function"}}))
    assert (refused.value.status, refused.value.param) == (400, name)


def test_what_changes_nothing_may_be_anything() -> None:
    fields: Any = {name: {"any": ["thing"]} for name in IGNORED}
    assert params_of(**fields) == params_of()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": "1"},
        {"temperature": True},
        {"temperature": float("nan")},
        {"top_k": 1.0},
        {"seed": "1"},
        {"ignore_eos": 1},
        {"stop_token_ids": ["a"]},
        {"stream": 1},
        {"unknown": 1},
    ],
)
def test_types_are_not_guessed(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        CompletionRequest(prompt="x", **fields)


def test_there_is_a_type_for_every_kind_of_field() -> None:
    """A new number needs nothing here; any other kind is told apart by its default."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(SamplingParams)}
    assert len(CompletionRequest.model_fields) == len(OPTIONS) + len(IGNORED) + len(REFUSED) + 9
    assert kinds.keys() == OPTIONS.keys()
