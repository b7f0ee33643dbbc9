from __future__ import annotations

from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.engine.results import SequenceResult


def test_a_cut_result_is_what_it_was_at_that_token() -> None:
    logprobs = [TokenLogprob(-float(i), [(i, -float(i))]) for i in range(4)]
    whole = SequenceResult([5, 6, 7, 8], "length", 3, 24, [1, 1, 2, 3], [8, 8, 16, 24], logprobs, 2)
    cut = whole.cut(3)
    assert cut == SequenceResult([5, 6, 7], "stop", 2, 16, [1, 1, 2], [8, 8, 16], logprobs[:3], 2)
    assert whole.cut(1).num_forwards == 1
    assert len(whole.token_ids) == 4


def test_a_cut_result_without_logprobs_has_none() -> None:
    assert SequenceResult([5, 6], "length", 1, 8, [1, 1], [8, 8]).cut(1).logprobs is None
