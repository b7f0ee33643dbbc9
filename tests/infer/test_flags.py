"""Flags of a command line from the fields of `SamplingParams`."""

import argparse
import dataclasses

import pytest

from infer.flags import NOT_FLAGS, add_decoding_options, add_flag, flag, sampling_params
from wedlm_jax.option_values import Option
from wedlm_jax.params import SamplingParams


def parsed(*arguments):
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS, allow_abbrev=False)
    add_decoding_options(parser)
    return vars(parser.parse_args(arguments))


GIVEN = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "max_tokens": 9,
    "stop": ("a", "b"),
    "stop_token_ids": (4, 5),
    "ignore_eos": True,
    "entropy_threshold": None,
    "position_penalty": 0.1,
    "seed": 3,
    "n": 2,
    "min_tokens": 1,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "bad_words": ("x",),
    "logprobs": 2,
    "mode": "paper",
    "draft": "lookup",
    "draft_budget": 1.0,
}


def words(name, value):
    if value is True:
        return [flag(name)]
    values = value if isinstance(value, tuple) else (value,)
    return [flag(name), *("none" if one is None else str(one) for one in values)]


def test_every_field_has_a_flag_that_gives_its_value():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert {*GIVEN, *NOT_FLAGS, "json_schema", "regex"} == fields
    arguments = [word for name, value in GIVEN.items() for word in words(name, value)]
    assert sampling_params(parsed(*arguments)) == SamplingParams(**GIVEN)
    assert parsed() == {}
    assert sampling_params({}) == SamplingParams()


def test_grammars_have_flags(tmp_path):
    assert sampling_params(parsed("--regex", "a+")) == SamplingParams(regex="a+")
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object"}')
    for schema in (str(file), '{"type": "object"}'):
        given = sampling_params(parsed("--json-schema", schema))
        assert given == SamplingParams(json_schema='{"type": "object"}')


def test_a_schema_that_cannot_be_read_is_told(tmp_path, capsys):
    (tmp_path / "cut").write_bytes(b'{"a')
    (tmp_path / "no-text").write_bytes(b"\xff")
    for name, sentence in (
        ("none", "No such file"),
        ("cut", "expected a JSON schema"),
        ("no-text", "cannot be read"),
    ):
        with pytest.raises(SystemExit):
            parsed("--json-schema", str(tmp_path / name))
        err = capsys.readouterr().err
        assert sentence in err
        assert str(tmp_path / name) in err


def test_a_flag_that_is_on_by_default_can_be_turned_off():
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_flag(parser, "--prefix-cache", Option("", flag=True), True, "")
    add_flag(parser, "--loud", Option("", flag=True), False, "")
    assert vars(parser.parse_args(["--no-prefix-cache"])) == {"prefix_cache": False}
    assert vars(parser.parse_args(["--loud"])) == {"loud": True}
    with pytest.raises(SystemExit):
        parser.parse_args(["--no-loud"])
