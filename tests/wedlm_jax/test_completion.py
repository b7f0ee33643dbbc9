"""A completion cut at one of its tokens. Texts and samples: `test_llm.py`."""

from __future__ import annotations

from wedlm_jax.completion import Completion
from wedlm_jax.decode.logprobs import TokenLogprob


def test_a_cut_completion_is_what_it_was_at_that_token() -> None:
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


def test_a_cut_completion_without_logprobs_has_none() -> None:
    whole = Completion(None, [5, 6], "length", 1, 8, forwards_at=[1, 1], instances_at=[8, 8])
    assert whole.cut(1).logprobs is None
