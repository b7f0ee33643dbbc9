"""Events of a sequence add up to its completion, in whatever pieces they come."""

import copy
import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.wedlm_jax.test_text import TEXTS, byte_tokenizer, write_tokenizer
from wedlm_jax.completion import Completion
from wedlm_jax.engine.interface import Failed, Finished, Request, TokenDelta
from wedlm_jax.generation import Handle, complete
from wedlm_jax.params import SamplingParams
from wedlm_jax.text import SETTLED_BEHIND, GrowingText, StopStrings, TextCodec

REQUEST = Request(0, (), SamplingParams())


class Loop:
    """Notes what is aborted."""

    def __init__(self):
        self.aborted = []

    def new_number(self):
        return 0

    def abort(self, numbers):
        self.aborted += numbers


@pytest.fixture(scope="module")
def codec(tmp_path_factory):
    tokenizer = byte_tokenizer([("a", "b"), ("b", "c"), ("ab", "ab")])
    return TextCodec.load(write_tokenizer(tmp_path_factory.mktemp("tokenizer"), tokenizer))


def result_of(token_ids, reason="length"):
    counts = list(range(1, len(token_ids) + 1))
    ends = len(token_ids)
    return Completion(None, token_ids, reason, ends, ends, None, (), 7, counts, counts)


def deltas(result, cuts):
    """The result in pieces of these sizes, over and over."""
    found, start, turn = [], 0, 0
    while start < len(result.token_ids):
        end = min(start + cuts[turn % len(cuts)], len(result.token_ids))
        part = slice(start, end)
        at = (result.forwards_at[part], result.instances_at[part], result.drafts_at[part])
        found.append(TokenDelta(REQUEST, result.token_ids[part], None, end, end, end, *at, 7))
        start, turn = end, turn + 1
    return found


long_ids = st.builds(
    lambda seed, count: random.Random(seed).choices(range(258), k=count),
    st.integers(0, 2**32),
    st.integers(1, 6 * SETTLED_BEHIND),
)
"""Bytes that are seldom characters, and specials."""
long_texts = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=40).map("".join)


def test_growing_text_decodes_its_end_alone(codec, monkeypatch):
    longest, decode = 0, codec.decode

    def watched(ids):
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(ids)

    monkeypatch.setattr(codec, "decode", watched)
    growing = GrowingText(codec)
    for token in codec.encode("naïve 日本 " * 200):
        growing.add([token])
    assert longest <= 4 * SETTLED_BEHIND


@given(
    data=st.data(),
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    stop=st.lists(st.sampled_from(["ab", "ï", "plain", "�", "\n\n", "zzz"]), max_size=3),
    early=st.integers(0, 40),
    ended=st.booleans(),
    bare=st.booleans(),
)
def test_pieces_add_up_to_the_completion(codec, data, cuts, stop, early, ended, bare):
    """Without a tokenizer and stop strings, tokens alone."""
    ids = data.draw(long_ids | long_texts.map(codec.encode))
    end = [257] if ended else []  # <|im_end|>
    params = SamplingParams(stop=tuple(stop), min_tokens=early, max_tokens=10_000)
    result = result_of(ids + end, "stop" if ended else "length")
    bare &= not stop
    given_codec = None if bare else codec
    whole = complete(given_codec, result, params)
    if not stop:
        text = None if bare else codec.complete_text(ids)
        assert (whole.text, whole.token_ids) == (text, ids + end)
    else:
        unstopped = len(ids + end), codec.complete_text(ids)
        count, text = StopStrings(codec, stop, early).find(ids) or unstopped
        assert (whole.text, len(whole.token_ids)) == (text, count)
    loop = Loop()
    handle, pieces = Handle(loop, given_codec, (), params, None), []
    parts = deltas(result, cuts)
    for number, delta in enumerate(parts):
        handle.take(delta)
        stopped = handle.is_over
        if not (stopped or bare):
            so_far = (ids + end)[: delta.num_output]
            assert handle.completion.text == codec.complete_text(so_far)
        if number == len(parts) - 1:
            handle.take(Finished(REQUEST, result))
        piece = handle.piece()
        if piece is not None:
            pieces.append(piece)
        if handle.is_over:
            break
        assert handle.piece() is None
    assert handle.completion == whole
    assert handle.counts == (len(whole.token_ids), whole.num_forwards, whole.num_token_instances)
    assert loop.aborted == [0] * stopped
    assert "".join(piece.text for piece in pieces) == (whole.text or "")
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert [piece.completion.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert whole.num_cached_tokens == 7


def test_a_failure_is_raised_and_ends_the_sequence():
    handle = Handle(Loop(), None, (), SamplingParams(), None)
    with pytest.raises(RuntimeError, match="lost"):
        handle.take(Failed(REQUEST, RuntimeError("lost")))
    assert handle.is_over


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("outputs", r"use \.text, \.token_ids and \.finish_reason in place of vLLM"),
        ("prompt_token_ids", "prompts are not kept"),
        ("cumulative_logprob", "it is sum"),
        ("tokens", "did you mean 'token_ids'"),
        ("output_text", "did you mean 'text'"),
    ],
)
def test_an_attribute_of_other_engines_is_told_by_ours(name, hint):
    with pytest.raises(AttributeError, match=f"^a Completion has no '{name}'; {hint}"):
        getattr(Completion("a", [5], "stop", 1, 1), name)


def test_a_completion_is_copied_and_sent_to_other_processes():
    one = Completion("a", [5], "stop", 1, 1)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert not hasattr(one, "__len__")
