"""A completion cut at one of its tokens. Texts and samples: `test_llm.py`."""

import copy
import pickle

import pytest

from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob


def test_a_cut_completion_is_what_it_was_at_that_token():
    logprobs = [TokenLogprob(-float(i), [(i, -float(i))]) for i in range(4)]
    whole = Completion(
        None,
        [5, 6, 7, 8],
        "length",
        3,
        24,
        logprobs,
        num_cached_tokens=2,
        forwards_at=[1, 1, 2, 3],
        instances_at=[8, 8, 16, 24],
    )
    assert whole.cut(3) == Completion(
        None,
        [5, 6, 7],
        "stop",
        2,
        16,
        logprobs[:3],
        num_cached_tokens=2,
        forwards_at=[1, 1, 2],
        instances_at=[8, 8, 16],
    )
    assert whole.cut(1).num_forwards == 1
    assert len(whole.token_ids) == 4


def test_a_cut_completion_without_logprobs_has_none():
    whole = Completion(None, [5, 6], "length", 1, 8, forwards_at=[1, 1], instances_at=[8, 8])
    assert whole.cut(1).logprobs is None


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("outputs", r"what vLLM has in outputs\[0\] is its own here \(\.text, "),
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
