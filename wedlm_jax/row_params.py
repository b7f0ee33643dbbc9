"""`RowParams` as the host keeps them: NumPy arrays with an entry a row, and what they hold.

Options that few rows use have arrays only in batches in which some row does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.buckets import bucket
from wedlm_jax.errors import InputError
from wedlm_jax.sampling import NO_TOKEN, SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.batch_sizes import BatchSizes

MOST_BIASES = 512
"""Tokens with a bias a row, at most."""
MOST_BAD_WORDS = 256
LONGEST_BAD_WORD = 16
"""In tokens."""


@dataclasses.dataclass(frozen=True)
class OptionSizes:
    """Which options the rows of a batch may use, and how much of each: static.

    Attributes:
      verified: whether rows may have that mode.
      autoregressive: whether rows may have a window of 0 beside those that the engine has.
      min_tokens, penalties: whether they may.
      num_biases: tokens with a bias a row, at most.
      num_bad_words, longest_bad_word: bad words a row, and tokens of each, at most.
      num_logprobs: alternatives beside each token's log-probability; None for neither.
    """

    verified: bool = False
    autoregressive: bool = False
    min_tokens: bool = False
    penalties: bool = False
    num_biases: int = 0
    num_bad_words: int = 0
    longest_bad_word: int = 0
    num_logprobs: int | None = None

    @staticmethod
    def of(params: Sequence[SamplingParams]) -> OptionSizes:
        """Sizes for any of these."""
        asked = [p.logprobs for p in params if p.logprobs is not None]
        return OptionSizes(
            verified=any(p.mode == "verified" for p in params),
            autoregressive=any(p.mode == "ar" for p in params),
            min_tokens=any(p.min_tokens for p in params),
            penalties=any(p.has_penalty for p in params),
            num_biases=_bucket_or_zero(max(len(p.logit_bias) for p in params), 8),
            num_bad_words=_bucket_or_zero(max(len(p.bad_words) for p in params), 4),
            longest_bad_word=_bucket_or_zero(
                max((len(word) for p in params for word in p.bad_words), default=0), 1
            ),
            num_logprobs=_bucket_or_zero(max(asked), 1) if asked else None,
        )

    def holds(self, params: SamplingParams) -> bool:
        """Whether a row of the batch can have these."""

        def numbers(sizes: OptionSizes) -> list[int]:
            logprobs = -1 if sizes.num_logprobs is None else sizes.num_logprobs
            return [*map(int, dataclasses.astuple(sizes)[:-1]), logprobs]

        needed = numbers(OptionSizes.of([params]))
        return all(n <= m for n, m in zip(needed, numbers(self), strict=True))


NO_OPTIONS = OptionSizes()


def _bucket_or_zero(size: int, smallest: int) -> int:
    return bucket(size, smallest) if size else 0


def check_options(params: SamplingParams, stops: Sequence[int], vocab: int) -> None:
    """Refuses options that a model of ``vocab`` tokens, or a row, cannot have.

    Raises:
      InputError: naming the option.
    """
    ids = [token for word in params.bad_words for token in word]
    if any(isinstance(token, str) for token in ids):
        raise InputError("bad_words: the engine takes token ids, not texts")
    for name, tokens in (("logit_bias", params.logit_bias), ("bad_words", ids)):
        if tokens and max(tokens) >= vocab:  # type: ignore[type-var, operator]
            raise InputError(f"{name}: {max(tokens)} is outside the vocabulary of {vocab}")  # type: ignore[type-var]
    if len(params.logit_bias) > MOST_BIASES:
        raise InputError(
            f"logit_bias: expected {MOST_BIASES} tokens at most, not {len(params.logit_bias)}"
        )
    if len(params.bad_words) > MOST_BAD_WORDS:
        raise InputError(
            f"bad_words: expected {MOST_BAD_WORDS} at most (a text counts twice: at the beginning "
            f"and behind a space), not {len(params.bad_words)}"
        )
    longest = max(map(len, params.bad_words), default=0)
    if longest > LONGEST_BAD_WORD:
        raise InputError(
            f"bad_words: expected {LONGEST_BAD_WORD} tokens a word at most, not {longest}"
        )
    # The worst case of one place: every token of every word, each stop token, the mask.
    early_stops = stops if params.min_tokens else ()
    if len({*ids, *early_stops}) + 1 >= vocab:
        raise InputError(f"bad_words: they leave no token of the vocabulary of {vocab}")
    if params.logprobs is not None and params.logprobs >= vocab:
        raise InputError(
            f"logprobs: expected fewer than the vocabulary of {vocab}, not {params.logprobs}"
        )


def idle_params(sizes: BatchSizes, window: int) -> dict[str, np.ndarray]:
    """Of rows that hold nothing."""

    def column(value: float, dtype: Any) -> np.ndarray:
        return np.full(sizes.rows, value, dtype)

    def token_ids(*shape: int) -> np.ndarray:
        return np.full((sizes.rows, *shape), NO_TOKEN, np.int32)

    params = {
        "window": column(window, np.int32),
        "temperature": column(0, np.float32),
        "top_p": column(1, np.float32),
        "top_k": column(0, np.int32),
        "max_tokens": column(0, np.int32),
        "entropy_threshold": column(0, np.float32),
        "position_penalty": column(0, np.float32),
        "seed": column(0, np.uint32),
        "stop_ids": token_ids(sizes.num_stops),
    }
    options = sizes.options
    if options.verified:
        params["verified"] = column(False, bool)
        params["draft_budget"] = column(0, np.float32)
    if options.min_tokens:
        params["min_tokens"] = column(0, np.int32)
    if options.num_biases:
        params["bias_ids"] = token_ids(options.num_biases)
        params["bias"] = np.zeros((sizes.rows, options.num_biases), np.float32)
    if options.num_bad_words:
        params["bad_words"] = token_ids(options.num_bad_words, options.longest_bad_word)
    if options.penalties:
        params["repetition_penalty"] = column(1, np.float32)
        params["presence_penalty"] = column(0, np.float32)
        params["frequency_penalty"] = column(0, np.float32)
        params["prompt"] = token_ids(sizes.cache_size)
    return params


def set_row(
    host: dict[str, np.ndarray],
    row: int,
    params: SamplingParams,
    *,
    window: int,
    stops: Sequence[int],
    prompt: Sequence[int] | np.ndarray,
    vocab: int,
) -> None:
    """Gives a row its parameters; the arrays are large enough for them."""
    threshold = params.entropy_threshold
    host["window"][row] = 0 if params.mode == "ar" else window
    if "verified" in host:
        host["verified"][row] = params.mode == "verified"
        host["draft_budget"][row] = params.draft_budget
    host["temperature"][row] = params.temperature
    host["top_p"][row] = params.top_p
    host["top_k"][row] = min(params.top_k, vocab)
    host["max_tokens"][row] = params.max_tokens
    host["entropy_threshold"][row] = -np.inf if threshold is None else threshold
    host["position_penalty"][row] = params.position_penalty
    host["seed"][row] = params.seed
    _fill_up(host["stop_ids"][row], stops)
    if "min_tokens" in host:
        host["min_tokens"][row] = params.min_tokens
    if "bias_ids" in host:
        _fill_up(host["bias_ids"][row], list(params.logit_bias))
        host["bias"][row] = 0
        host["bias"][row, : len(params.logit_bias)] = list(params.logit_bias.values())
    if "bad_words" in host:
        host["bad_words"][row] = NO_TOKEN
        for place, word in zip(host["bad_words"][row], params.bad_words, strict=False):
            _fill_up(place, word)  # type: ignore[arg-type]
    if "prompt" in host:
        host["repetition_penalty"][row] = params.repetition_penalty
        host["presence_penalty"][row] = params.presence_penalty
        host["frequency_penalty"][row] = params.frequency_penalty
        _fill_up(host["prompt"][row], prompt)


def _fill_up(place: np.ndarray, tokens: Sequence[int] | np.ndarray) -> None:
    place[:] = NO_TOKEN
    place[: len(tokens)] = tokens
