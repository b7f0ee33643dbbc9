"""Sampling parameters: what is taken, what is refused, and what is said of each."""

import dataclasses
import json

import pydantic
import pytest

import wedlm_jax
from wedlm_jax.errors import InputError
from wedlm_jax.params import DEFAULT_MODE, OPTIONS, SamplingParams, sample_seed

NAN, INFINITE = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("temperature", [-0.1, NAN, "1", None]),
        ("top_k", [-2, 2.0]),
        ("min_p", [-0.1, 1.5]),
        ("max_tokens", [True]),
        ("position_penalty", [-1]),
        ("entropy_threshold", [-0.5, NAN]),
        ("draft_budget", [-1, INFINITE]),
        ("seed", [2**32]),
        ("stop", [("",), 5, [5], {"a": 1}, b"a"]),
        ("stop_token_ids", [(-1,), ("a",), 5, "5", [True]]),
        ("ignore_eos", [1]),
        ("mode", [None]),
        ("n", [0, 1.5]),
        ("min_tokens", [-1, 257]),
        ("repetition_penalty", [0, NAN]),
        ("presence_penalty", [2.1]),
        ("frequency_penalty", [-2.1]),
        ("logit_bias", [[3], {-1: 1}, {"a": 1}, {3: 101}, {3: "1"}, {3: NAN}]),
        ("bad_words", [("",), (" ",), ((),), ((3, -1),), (3,), 3]),
        ("logprobs", [-1, True]),
    ],
)
def test_a_bad_parameter_is_refused_by_name(field, values):
    for value in values:
        with pytest.raises(InputError, match=f"^{field}: expected"):
            SamplingParams(**{field: value})


REFUSED = [
    ({"temperature": 2e6}, "temperature: expected a number from 0 to 1,000,000, not 2000000.0"),
    ({"top_p": 0}, "top_p: expected a number above 0, up to 1, not 0"),
    ({"top_p": 1.1}, "top_p: expected a number above 0, up to 1, not 1.1"),
    ({"top_k": None}, "top_k: expected an integer of at least 0, not None"),
    ({"max_tokens": 0}, "max_tokens: expected an integer of at least 1, not 0"),
    ({"seed": -2}, "seed: expected an integer from 0 to 4,294,967,295, not -2"),
    ({"logprobs": 21}, "logprobs: expected an integer from 0 to 20, not 21"),
    ({"mode": "fast"}, "mode: expected one of paper, verified, ar, not 'fast'"),
    ({"ignore_eos": "yes"}, "ignore_eos: expected true or false, not 'yes'"),
    ({"min_tokens": 300}, "min_tokens: expected at most max_tokens, 256, not 300"),
    ({"n": 2}, "n: expected 1 at temperature 0, where all samples are the same, not 2"),
    ({"temprature": 0.5}, "unknown sampling field 'temprature'; did you mean 'temperature'?"),
    ({"zzz": 1}, "unknown sampling field 'zzz'; expected one of"),
    ({"json_schema": "x"}, "json_schema: expected a JSON schema, an object or its text (Expecting"),
    ({"json_schema": "[1]"}, "json_schema: expected a JSON schema, an object or its text, not [1]"),
    ({"json_schema": True}, "json_schema: expected a JSON schema"),
    ({"json_schema": '{"minimum": NaN}'}, "(NaN is not JSON)"),
    ({"json_schema": {"a": {1, 2}}}, "set is not JSON"),
    ({"json_schema": {"a": "\ud800"}}, "('utf-8' codec"),
    ({"regex": 3}, "regex: expected a text, not 3"),
    ({"regex": "a", "json_schema": {}}, "regex: cannot be combined with json_schema"),
    ({"regex": "a", "mode": "paper"}, "regex: expected mode verified or ar"),
    ({"json_schema": {}, "mode": "paper"}, "json_schema: expected mode verified or ar"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos: cannot be combined with regex"),
    ({"regex": "a", "min_tokens": 1}, "min_tokens: cannot be combined with regex"),
    ({"regex": "a", "bad_words": "b"}, "bad_words: cannot be combined with regex"),
]


@pytest.mark.parametrize(("fields", "sentence"), REFUSED)
def test_a_refusal_names_the_field_and_says_what_was_expected(fields, sentence):
    with pytest.raises(InputError) as refusal:
        SamplingParams(**fields)
    assert sentence in str(refusal.value)


def test_options_as_json_has_them_are_taken_too():
    loose = {
        "logit_bias": {"3": 1, 4: -2.5},
        "bad_words": ["ab", [3, 4]],
        "stop": "ab",
        "stop_token_ids": [3],
    }
    params = wedlm_jax.SamplingParams(**loose)
    assert (params.stop, params.stop_token_ids) == (("ab",), (3,))
    assert params.logit_bias == {3: 1, 4: -2.5}
    assert params.bad_words == ("ab", (3, 4))
    assert SamplingParams(bad_words="ab").bad_words == ("ab",)
    empty = dict.fromkeys(("logit_bias", "bad_words", "stop", "stop_token_ids"))
    assert SamplingParams(**empty) == SamplingParams()
    assert hash(params) == hash(SamplingParams(**loose))
    assert SamplingParams(n=2, temperature=0.7).n == 2
    assert SamplingParams(top_k=-1, seed=-1) == SamplingParams(top_k=0, seed=None)
    for mode in ("paper", "verified", "ar"):
        assert SamplingParams(mode=mode, presence_penalty=1.0, bad_words=[[3]]).mode == mode
    assert SamplingParams().mode == DEFAULT_MODE


def test_of_every_field_something_is_said():
    assert list(OPTIONS) == [field.name for field in dataclasses.fields(SamplingParams)]
    for name, option in OPTIONS.items():
        assert option.help, name
        assert not option.help.endswith("."), name
        if option.none is None:
            with pytest.raises(InputError, match=f"^{name}: "):
                SamplingParams(**{name: None})
        else:
            SamplingParams(**{name: None})


def test_bounds_themselves_are_taken():
    for name, option in OPTIONS.items():
        for bound in (option.low, option.high):
            if bound in (None, float("inf")) or (option.above and bound == option.low):
                continue
            value = int(bound) if option.integer else bound
            others = {"temperature": 0.5} if name == "n" else {}
            SamplingParams(**{name: value, **others})


def test_the_first_sample_has_the_prompt_s_seed_and_the_others_their_own():
    seeds = [sample_seed(seed, i) for seed in range(20) for i in range(20)]
    assert seeds[::20] == list(range(20))
    assert len(set(seeds)) == 400
    assert all(0 <= seed < 2**32 for seed in seeds)
    # Of this version and every later one.
    assert [sample_seed(7, i) for i in range(3)] == [7, 369571992, 1009178997]


def test_a_schema_is_kept_as_its_text_in_the_order_of_its_keys():
    schema = {"type": "object", "properties": {"é": {}, "a": {}}}
    params = SamplingParams(json_schema=schema)
    assert json.loads(params.json_schema or "") == schema
    assert list(json.loads(params.json_schema or "")["properties"]) == ["é", "a"]
    again = SamplingParams(json_schema=params.json_schema)
    assert (again, hash(again)) == (params, hash(params))
    assert params.grammar == ("json_schema", params.json_schema)
    assert SamplingParams(regex="a").grammar == ("regex", "a")
    assert SamplingParams(regex="").grammar == ("regex", "")
    assert SamplingParams().grammar is None


class City(pydantic.BaseModel):
    name: str
    founded: int


class Schema:
    """Says its schema, and is none of pydantic's."""

    @staticmethod
    def model_json_schema():
        return {"type": "integer"}


@pytest.mark.parametrize("given", [City, City(name="Rome", founded=-753), Schema, Schema()])
def test_whatever_says_its_schema_is_one(given):
    # Keys are in the order of the class.
    expected = json.dumps(given.model_json_schema())
    assert SamplingParams(json_schema=given).json_schema == expected
