"""Sampling options as device arrays, and the traits that determine which options a program has.

An option that few sequences use has an array only in programs with its trait; other programs
contain no code for it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.state import HeadRows
from wedlm_jax.errors import InputError
from wedlm_jax.params import NO_TOKEN, OPTIONS, SamplingParams
from wedlm_jax.sharding import constrain

MOST_BIASES = 512
"""Maximum number of biased tokens per sequence."""
MOST_BAD_WORDS = 256
"""Maximum number of bad words per sequence."""
LONGEST_BAD_WORD = 16
"""Maximum number of tokens in a bad word."""
MOST_STOPS = 64
"""Maximum number of stop tokens per sequence, including the model's."""


UNSET = {"entropy_threshold": -np.inf, "draft_budget": np.nan}
"""What stands for None on the device: nothing is below −inf, and NaN means the program's usual
budget."""


@dataclasses.dataclass(frozen=True)
class Traits:
    """The features that the sequences of a program may use; static. List options always have their
    maximum size, so that few programs are compiled.

    Attributes:
      window: the widest window.
      paper: whether sequences may decode in mode "paper".
      verified: whether sequences may draft and verify.
      lookup: maximum drafts copied from a text.
      autoregressive: whether sequences may decode one token at a time, with a window of 0.
      sampled: whether tokens may be sampled, at a temperature above 0.
      truncated: whether they may be sampled from only part of the vocabulary.
      min_tokens, penalties: whether sequences may have ``min_tokens``, or a penalty.
      biases, bad_words: whether sequences may have a ``logit_bias``, or bad words.
      logprobs: whether tokens have log-probabilities, with the maximum number of alternatives.
      grammar: whether sequences may have a grammar.
      traced: whether each forward reports what it saw and decided.
    """

    window: int = 0
    paper: bool = False
    verified: bool = False
    lookup: int = 0
    autoregressive: bool = False
    sampled: bool = False
    truncated: bool = False
    min_tokens: bool = False
    penalties: bool = False
    biases: bool = False
    bad_words: bool = False
    logprobs: bool = False
    grammar: bool = False
    traced: bool = False

    @staticmethod
    def of(params: SamplingParams, window: int, lookup: int = 0) -> Traits:
        """Returns the traits of a sequence with ``params``, a window of at most ``window`` masks,
        and at most ``lookup`` drafts from its text."""
        mode = params.mode if window or lookup else "ar"
        return Traits(
            window=0 if mode == "ar" else window,
            paper=mode == "paper",
            verified=mode == "verified",
            lookup=lookup,
            autoregressive=mode == "ar" or not window,
            sampled=params.temperature > 0,
            truncated=params.is_truncated,
            min_tokens=params.min_tokens > 0,
            penalties=params.has_penalty,
            biases=bool(params.logit_bias),
            bad_words=bool(params.bad_words),
            logprobs=params.logprobs is not None,
            grammar=params.grammar is not None,
        )

    @staticmethod
    def everything(window: int, lookup: int = 0, *, grammar: bool) -> Traits:
        """Returns the traits of a program for all requests: every mode, option and trace, and
        grammars if ``grammar``; windows of at most ``window``, 0 for a model without masks, and at
        most ``lookup`` drafts copied from a text."""
        every: dict[str, Any] = {field.name: True for field in dataclasses.fields(Traits)}
        every |= {"window": window, "lookup": lookup, "grammar": grammar}
        return Traits(**{**every, "paper": window > 0, "verified": window + lookup > 0})

    @property
    def are_everything(self) -> bool:
        """Whether all requests with these windows can be decoded, except those with a grammar."""
        return self.holds(Traits.everything(self.window, self.lookup, grammar=False))

    @property
    def rounded(self) -> Traits:
        """The traits of a program for requests like these. Options that are mostly used together,
        or cost little, are included together, so that a server compiles few programs."""
        edited = self.min_tokens or self.penalties or self.biases or self.bad_words
        edits = Traits(min_tokens=True, penalties=True, biases=True, bad_words=True)
        rounded = self.union(Traits(truncated=self.sampled))
        return rounded.union(edits) if edited else rounded

    @property
    def anchored(self) -> bool:
        """Whether sequences may choose their tokens as autoregressive decoding does."""
        return self.verified or self.autoregressive

    @property
    def checked_rows(self) -> int:
        """The number of rows that choose tokens in an anchored window: one more than the maximum
        number of drafts, which is W − 1 from masks, or ``lookup`` from the text."""
        return max(self.window, self.lookup + 1)

    @property
    def without_windows(self) -> Traits:
        """The traits of the same sequences while none of them has a window."""
        drafts = self.lookup > 0
        return dataclasses.replace(
            self, window=0, paper=False, verified=drafts, autoregressive=True
        )

    def union(self, other: Traits) -> Traits:
        """Returns the traits of a program for the sequences of both."""

        names = (field.name for field in dataclasses.fields(self))
        # For numbers this is the larger one, for booleans "or".
        return Traits(**{name: max(getattr(self, name), getattr(other, name)) for name in names})

    def holds(self, other: Traits) -> bool:
        """Returns whether a program with these traits can decode sequences with ``other``."""
        return self.union(other) == self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Options:
    """The `SamplingParams` of N sequences, and their windows, as arrays ``[N]``.

    All but the first three are None in a program without their trait. Those named like a field of
    `SamplingParams` hold that field.

    Attributes:
      window: int32, W; 0 for a sequence that decodes autoregressively.
      stop_ids: int32 ``[N, M]``, padded with `NO_TOKEN`.
      max_tokens: int32.
      entropy_threshold, position_penalty: with trait "paper". A threshold of None is −inf.
      verified: bool, with trait "verified".
      lookup, unpriced: int32 and bool, with trait "lookup": the maximum number of drafts copied
        from the text, and whether they are taken regardless of cost.
      bias_ids, bias: int32 and float32 ``[N, K]``, the ids padded with `NO_TOKEN`.
      bad_words: int32 ``[N, K, L]``, padded with `NO_TOKEN`.
      allowed: the tokens that grammars allow, from `wedlm_jax.grammar.masks`; see `all_allowed`.
        Unlike the others it is valid for one forward only.
    """

    window: Array
    stop_ids: Array
    max_tokens: Array
    entropy_threshold: Array | None = None
    position_penalty: Array | None = None
    verified: Array | None = None
    draft_budget: Array | None = None
    lookup: Array | None = None
    unpriced: Array | None = None
    temperature: Array | None = None
    seed: Array | None = None
    top_p: Array | None = None
    top_k: Array | None = None
    min_p: Array | None = None
    min_tokens: Array | None = None
    repetition_penalty: Array | None = None
    presence_penalty: Array | None = None
    frequency_penalty: Array | None = None
    bias_ids: Array | None = None
    bias: Array | None = None
    bad_words: Array | None = None
    allowed: Array | None = None

    @property
    def anchored(self) -> Array:
        """bool ``[N]``: which sequences choose every token as autoregressive decoding would. Their
        window starts with the last token of the text."""
        without_window = self.window == 0
        return without_window if self.verified is None else without_window | self.verified


class HostOptions:
    """The host's copy of `Options`: NumPy arrays ``[N, ...]``, for the traits of all sequences
    together."""

    def __init__(self, sequences: int, traits: Traits):
        self.traits = traits
        self.arrays = _idle_arrays(sequences, traits)
        self._idle = _idle_arrays(1, traits)
        self._held: dict[int, tuple[SamplingParams, int, int, tuple[int, ...]]] = {}

    def set(
        self,
        index: int,
        params: SamplingParams,
        *,
        window: int,
        stops: Sequence[int],
        lookup: int = 0,
    ) -> None:
        """Sets the options of sequence ``index``; ``stops`` are all token ids that end it,
        and ``lookup`` is the maximum drafts copied from its text. Mode "ar" ignores ``window``.

        Raises ValueError if the traits do not cover these options.
        """
        if not self.traits.holds(Traits.of(params, window, lookup)):
            raise ValueError(f"options not covered by the program's traits, {self.traits}")
        self._held[index] = params, window, lookup, tuple(stops)
        arrays = self.arrays
        arrays["window"][index] = 0 if params.mode == "ar" else window
        _fill_up(arrays["stop_ids"][index], stops)
        for name in _numbers(self.traits):
            arrays[name][index] = _as_number(name, getattr(params, name))
        if "verified" in arrays:
            arrays["verified"][index] = params.mode == "verified"
        if "lookup" in arrays:
            arrays["lookup"][index] = lookup
            arrays["unpriced"][index] = params.draft == "lookup"
        if "bias" in arrays:
            _fill_up(arrays["bias_ids"][index], list(params.logit_bias))
            arrays["bias"][index] = 0
            arrays["bias"][index, : len(params.logit_bias)] = list(params.logit_bias.values())
        if "bad_words" in arrays:
            arrays["bad_words"][index] = NO_TOKEN
            for place, word in zip(arrays["bad_words"][index], params.bad_words, strict=False):
                _fill_up(place, word)  # type: ignore[arg-type]

    def set_windows(self, windows: np.ndarray) -> None:
        """Sets the window of every sequence, int ``[N]``; in mode "ar" it stays 0."""
        for index, (params, _, lookup, stops) in self._held.items():
            window = int(windows[index])
            self._held[index] = params, window, lookup, stops
            self.arrays["window"][index] = 0 if params.mode == "ar" else window

    def clear(self, index: int) -> None:
        """Resets the options of sequence ``index`` to those of an unused place."""
        if self._held.pop(index, None) is not None:
            for name, array in self.arrays.items():
                array[index] = self._idle[name][0]

    def with_traits(self, traits: Traits) -> HostOptions:
        """Returns the same options for a program with other traits. Options that it does not cover
        are left out: they belong to aborted sequences."""
        other = HostOptions(len(self.arrays["window"]), traits)
        for index, (params, window, lookup, stops) in self._held.items():
            if traits.holds(Traits.of(params, window, lookup)):
                other.set(index, params, window=window, stops=stops, lookup=lookup)
        return other

    def options(self, traits: Traits | None = None) -> Options:
        """Returns a copy of the arrays for a program with ``traits``, by default `self.traits`."""
        names = _names(traits or self.traits)
        return Options(**{name: self.arrays[name].copy() for name in names})  # type: ignore[arg-type]


def abstract_options(sequences: int, traits: Traits, vocab: int) -> Options:
    """Returns the shapes of the options of N sequences, for compiling."""
    arrays = _idle_arrays(sequences, traits)
    if traits.grammar:
        arrays["allowed"] = all_allowed(sequences, traits.checked_rows, vocab)
    return Options(**{k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in arrays.items()})  # type: ignore[arg-type]


def _numbers(traits: Traits) -> list[str]:
    """Lists the fields of `SamplingParams` that have an array ``[N]`` in a program with
    ``traits``."""
    return [
        name
        for name, option in OPTIONS.items()
        if option.array and (option.trait is None or getattr(traits, option.trait))
    ]


@functools.lru_cache(maxsize=16)
def _names(traits: Traits) -> list[str]:
    """Lists the fields of `Options` that a program with ``traits`` has."""
    return list(_idle_arrays(1, traits))


def _as_number(name: str, value: float | None) -> float:
    if value is None:
        return UNSET[name]
    integers = OPTIONS[name].array == "int32"
    return min(value, np.iinfo(np.int32).max) if integers else value


def _idle_arrays(sequences: int, traits: Traits) -> dict[str, np.ndarray]:
    def token_ids(*shape: int) -> np.ndarray:
        return np.full((sequences, *shape), NO_TOKEN, np.int32)

    defaults = SamplingParams()
    arrays = {
        name: np.full(sequences, _as_number(name, getattr(defaults, name)), OPTIONS[name].array)
        for name in _numbers(traits)
    }
    arrays["window"] = np.zeros(sequences, np.int32)
    arrays["stop_ids"] = token_ids(MOST_STOPS)
    if traits.verified:
        arrays["verified"] = np.zeros(sequences, bool)
    if traits.lookup:
        arrays["lookup"] = np.zeros(sequences, np.int32)
        arrays["unpriced"] = np.zeros(sequences, bool)
    if traits.biases:
        arrays["bias_ids"] = token_ids(MOST_BIASES)
        arrays["bias"] = np.zeros((sequences, MOST_BIASES), np.float32)
    if traits.bad_words:
        arrays["bad_words"] = token_ids(MOST_BAD_WORDS, LONGEST_BAD_WORD)
    return arrays


def _fill_up(place: np.ndarray, tokens: Sequence[int]) -> None:
    place[:] = NO_TOKEN
    place[: len(tokens)] = tokens


def check_options(params: SamplingParams, stops: Sequence[int], vocabulary: Vocabulary) -> None:
    """Refuses options that do not fit the vocabulary, or exceed a limit, with an InputError that
    names the option. ``stops`` are all token ids that end the sequence."""
    if any(isinstance(token, str) for word in params.bad_words for token in word):
        raise InputError("bad_words: the engine takes token ids, not texts")
    ids = [int(token) for word in params.bad_words for token in word]
    named = {
        "logit_bias": params.logit_bias,
        "bad_words": ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for name, tokens in named.items():
        if tokens and max(tokens) >= vocabulary.size:  # type: ignore[type-var, operator]
            raise InputError(
                f"{name}: {max(tokens)} is outside the vocabulary of {vocabulary.size}"  # type: ignore[type-var]
            )
    if len(params.logit_bias) > MOST_BIASES:
        raise InputError(
            f"logit_bias: expected at most {MOST_BIASES} tokens, not {len(params.logit_bias)}"
        )
    if len(params.bad_words) > MOST_BAD_WORDS:
        raise InputError(
            f"bad_words: expected at most {MOST_BAD_WORDS} (a text counts twice: at the start "
            f"and after a space), not {len(params.bad_words)}"
        )
    longest = max(map(len, params.bad_words), default=0)
    if longest > LONGEST_BAD_WORD:
        raise InputError(
            f"bad_words: expected at most {LONGEST_BAD_WORD} tokens in a word, not {longest}"
        )
    if len(stops) > MOST_STOPS:
        raise InputError(
            f"stop_token_ids: expected at most {MOST_STOPS}, the model's included, not {len(stops)}"
        )
    # In the worst case one place forbids every token of every word, and each stop token.
    early_stops = stops if params.min_tokens else ()
    choices = len(vocabulary)
    if len({token for token in (*ids, *early_stops) if token in vocabulary}) >= choices:
        raise InputError(f"bad_words: these forbid all {choices} tokens that may be chosen")
    if params.logprobs is not None and params.logprobs > choices:
        raise InputError(
            f"logprobs: expected at most {choices}, the tokens that may be chosen, "
            f"not {params.logprobs}"
        )


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The token ids that may be chosen; static.

    A model's output has more rows than there are tokens, since vocabularies are padded to a round
    number: Qwen3's from 151,669 to 151,936. Nothing keeps the logits of the padding low, and its
    ids have no text.

    Attributes:
      size: V, the rows of the model's output.
      end: no id from here on may be chosen.
      never: lower ids that may not be chosen: the mask token, and gaps in the numbering; ascending.
    """

    size: int
    end: int
    never: tuple[int, ...] = ()

    @staticmethod
    def of(config: ModelConfig, known: Collection[int] | None = None) -> Vocabulary:
        """Returns the vocabulary of a model. The ids that its tokenizer knows and the end-of-text
        tokens may be chosen; without a tokenizer (None), all ids but the mask token's."""
        size, mask = config.vocab_size, config.mask_token_id
        chosen = np.ones(size, bool)
        if known is not None:
            ids = np.array([*known, *config.eos_token_ids], np.int64)
            chosen[:] = False
            chosen[ids[ids < size]] = True
        if mask is not None:
            chosen[mask] = False
        # Without a tokenizer the mask token is the only exception, even if it is the last id.
        end = size if known is None else int(chosen.nonzero()[0].max(initial=-1)) + 1
        return Vocabulary(size, end, tuple(np.flatnonzero(~chosen[:end]).tolist()))

    def __contains__(self, token: int) -> bool:
        return 0 <= token < self.end and token not in self.never

    def __len__(self) -> int:
        return self.end - len(self.never)

    def restricted(self, logits: Array) -> Array:
        """Returns ``logits [R, V]`` with −inf for tokens that may not be chosen."""
        if self.never:
            ids = self.never[0] if len(self.never) == 1 else np.array(self.never)
            logits = logits.at[:, ids].set(-jnp.inf)
        if self.end == self.size:
            return logits
        # The compiler fuses this comparison with whatever reads the logits, on each part of a
        # sharded vocabulary.
        return jnp.where(jnp.arange(self.size) < self.end, logits, -jnp.inf)


BITS = 32


# --- The tokens that a grammar allows ----------------------------------------------------------
#
# Before a forward the host computes the allowed tokens as bits, which the forward applies to its
# rows of logits.
#
# A grammar determines what may follow a text, so it applies only to rows that see a text and
# nothing else: those of filled slots in anchored sequences. Slot s of a window is the place after
# the text's last token (slot 0) and the drafts in slots 1 .. s − 1. A draft that breaks the grammar
# is not what its row chooses, so it is rejected, and the bits of the slots after it do not matter.
# Masks draft freely, since their drafts are verified.


def all_allowed(sequences: int, rows: int, vocab: int) -> np.ndarray:
    """Returns masks that allow every token, uint32 ``[N, R, V / 32]`` rounded up.

    Entry r is for slot r + 1. R is `wedlm_jax.decode.options.Traits.checked_rows`. Token t is bit
    ``t % 32`` of word ``t // 32``.
    """
    return np.full((sequences, rows, -(-vocab // BITS)), 2**BITS - 1, np.uint32)


def allowed_tokens(masks: Array, rows: HeadRows, vocab: int) -> Array:
    """Returns the tokens that each row may choose, bool ``[R, V]``; all of them for a row that is a
    mask."""
    entry = jnp.clip(rows.slot - 1, 0, masks.shape[1] - 1)
    words = masks[rows.sequence, entry]
    bits = (words[:, :, None] >> jnp.arange(BITS, dtype=jnp.uint32)) & 1
    # Every device has all bits and takes its own part. Otherwise the compiler shards the words, and
    # where these shards differ from the vocabulary's, devices have to exchange bits.
    allowed = constrain(bits.reshape(words.shape[0], -1)[:, :vocab] == 1, None, None)
    return constrain(allowed | rows.is_mask[:, None], None, "vocab")
