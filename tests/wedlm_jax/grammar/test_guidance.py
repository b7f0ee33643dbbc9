"""JSON schemas and regular expressions over the embedded model's tokens."""

import json
import re
import sys
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.examples.schemas import fits, random_schema
from wedlm_jax.checkpoint.open import EMBEDDED_MODEL
from wedlm_jax.errors import InputError
from wedlm_jax.grammar.guidance import LONGEST, TokenizerGrammars
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import TextCodec

ENDS = (2, 0)
VOCAB = 1790 + 70
"""More than the tokenizer has, as vocabularies are padded."""


@pytest.fixture(scope="module")
def codec():
    return TextCodec.load(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def grammars(codec):
    return TokenizerGrammars(codec.tokenizer, VOCAB, ENDS)


def allowed(grammars, matcher, drafts):
    """The tokens allowed behind the text, and behind each of the drafts."""
    masks = np.zeros((len(drafts) + 3, -(-VOCAB // 32)), np.uint32)
    grammars.fill([(matcher, 1, drafts)], masks)
    assert not masks[0].any()
    assert not masks[-1].any()
    bits = np.unpackbits(masks[1:-1].view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
    return [np.flatnonzero(row) for row in bits]


def wander(grammars, codec, params, seed):
    """A text of tokens chosen blindly among those that are allowed."""
    rng, matcher, ids = np.random.default_rng(seed), grammars.matcher(params), list[int]()
    for _ in range(2000):
        (tokens,) = allowed(grammars, matcher, [])
        assert matcher.is_accepting() == set(ENDS).issubset(tokens)
        assert matcher.is_accepting() or not set(ENDS) & set(tokens)
        # Rarely a space, which would soon be most of the text.
        spaces = [not codec.decode([int(token)]).strip() for token in tokens]
        weights = np.where(spaces, 0.02, 1.0)
        token = int(rng.choice(tokens, p=weights / weights.sum()))
        if token in ENDS:
            return codec.decode(ids)
        assert matcher.consume_tokens([token])
        ids.append(token)
    raise AssertionError(f"no end: {codec.decode(ids)[:200]}")


@given(seed=st.integers(0, 2**32 - 1))
def test_whatever_is_chosen_fits_the_schema(grammars, codec, seed):
    schema = random_schema(np.random.default_rng(seed))
    text = wander(grammars, codec, SamplingParams(json_schema=schema), seed)
    assert fits(text, schema), (schema, text)


@pytest.mark.parametrize("regex", ["(ab|cd)+e \\d{2,5}", "é{2,4}z?", "", "[^x]{3}", "a.c"])
def test_whatever_is_chosen_matches_the_expression(grammars, codec, regex):
    for seed in range(5):
        text = wander(grammars, codec, SamplingParams(regex=regex), seed)
        assert re.fullmatch(regex, text)


def test_behind_drafts_stands_what_stands_there_step_by_step(grammars, codec):
    params = SamplingParams(json_schema={"type": "object", "required": ["a"]})
    drafts = codec.encode('{"a": [1, "x"]}')
    matcher, alone = grammars.matcher(params), grammars.matcher(params)
    together = allowed(grammars, matcher, drafts)
    for draft, tokens in zip(drafts, together, strict=False):
        np.testing.assert_array_equal(tokens, allowed(grammars, alone, [])[0])
        assert alone.consume_tokens([draft])
    # The matcher is where it was, and a wrong draft does it no harm.
    wrong = allowed(grammars, matcher, [drafts[0], drafts[0], drafts[0]])
    np.testing.assert_array_equal(wrong[0], together[0])
    np.testing.assert_array_equal(wrong[1], together[1])
    assert matcher.consume_tokens(drafts)


def test_json_may_be_written_as_it_usually_is_and_spaces_come_to_an_end(grammars, codec):
    params = SamplingParams(json_schema={"type": "object"})
    indented = json.dumps({"a": 1, "b": "x"}, indent=4)
    for text in ('{"a": 1, "b": "x"}', '{"a":1,"b":"x"}', indented):
        matcher = grammars.matcher(params)
        assert matcher.consume_tokens(codec.encode(text))
        assert matcher.is_accepting()
    assert not grammars.matcher(params).consume_tokens(codec.encode('{  "a": 1'))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"regex": "[a-z"}, "regex: unclosed character class"),
        ({"regex": "(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not"),
        ({"regex": "(a)\\1"}, "regex: backreferences are not supported"),
        ({"regex": "a" * (LONGEST + 1)}, f"regex: expected at most {LONGEST} characters"),
        ({"regex": "\ud800"}, "regex: 'utf-8' codec can't encode"),
        ({"json_schema": {"type": "thing"}}, "json_schema: Invalid type: thing"),
        ({"json_schema": {"not": {}}}, 'json_schema: Unimplemented keys: ["not"]'),
        ({"json_schema": {"not": {}, "x-guidance": {"lenient": True}}}, "json_schema: Unimpl"),
        ({"json_schema": {"$ref": "http://x/y"}}, "json_schema: Resource 'http://x/y' is not"),
        ({"json_schema": {"minimum": 5, "maximum": 3, "type": "integer"}}, "json_schema: Unsatis"),
    ],
)
def test_what_cannot_be_followed_is_told_in_a_sentence(grammars, params, message):
    with pytest.raises(InputError) as refused:
        grammars.check(SamplingParams(**params))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_deep_schemas_are_told_too(grammars):
    schema = {}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InputError, match=r"^json_schema: "):
        grammars.check(SamplingParams(json_schema=schema))


def test_a_tokenizer_that_does_not_fit_is_told(codec):
    with pytest.raises(InputError, match=r"^regex: vocab size too small; 1000 vs 1790"):
        TokenizerGrammars(codec.tokenizer, 1000, ENDS).check(SamplingParams(regex="a"))
    with pytest.raises(InputError, match=r"^regex: this model has no end-of-text token"):
        TokenizerGrammars(codec.tokenizer, VOCAB, ()).check(SamplingParams(regex="a"))


def test_without_the_library_its_name_is_told(codec):
    grammars = TokenizerGrammars(codec.tokenizer, VOCAB, ENDS)
    grammars.check(SamplingParams())
    with (
        mock.patch.dict(sys.modules, {"llguidance": None}),
        pytest.raises(
            InputError, match=r"^regex needs llguidance, .* pip install \"wedlm-jax\[gramm"
        ),
    ):
        grammars.check(SamplingParams(regex="a"))
