"""Which masks to fill, and with what: entropies, the fill rule, token sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from wedlm_jax.errors import InputError

NO_TOKEN = -1
"""Fills up arrays of token ids."""


MOST_LOGPROBS = 20
"""Alternatives a token, at most."""

MOST_SAMPLES = 1024
"""Completions of one prompt, at most."""

MODES = ("paper", "verified", "ar")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one prompt is decoded. docs/sampling.md says what each means under parallel filling.

    Attributes:
      temperature: 0 takes the most likely token; above, the logits are divided by it.
      top_p: keep the smallest set of tokens whose probabilities reach this; 1 keeps all.
      top_k: keep this many most likely tokens; 0 keeps all. Applied before ``top_p``.
      max_tokens: completion tokens at most.
      stop: texts that end the completion; matched on the decoded text, trimmed from it.
      stop_token_ids: token ids that end it, beside the model's EOS; kept in ``token_ids``,
        absent from ``text``.
      ignore_eos: go on behind the model's EOS, to ``max_tokens`` or another stop.
      entropy_threshold: τ in nats. Every mask whose adjusted entropy lies below is filled;
        None fills one mask per forward.
      position_penalty: λ, added to the entropy per slot of distance from the first mask.
      seed: of the row's random stream; the same seed gives the same row in any batch.
      n: completions of the prompt, each from a seed of its own.
      min_tokens: completion tokens before which no stop token is filled and no stop string
        counts.
      repetition_penalty: divides positive and multiplies negative logits of tokens that the
        prompt or the completion has; 1 changes nothing.
      presence_penalty: taken from the logits of tokens that the completion has.
      frequency_penalty: the same, as often as the completion has them.
      logit_bias: added to the logits of these token ids, before all else.
      bad_words: token-id sequences or texts that the completion never has.
      logprobs: None, or how many alternatives to give beside the log-probability of each
        committed token.
      mode: "paper" commits what masks were filled with; "verified" only what autoregressive
        decoding would have committed, see `wedlm_jax.verification`; "ar" decodes
        autoregressively. With a window of 0 all rows do.
      draft_budget: in mode "verified", nats that the entropies of a window's drafts may add
        up to; more are drafted and more rejected the larger it is. Changes the speed, never the
        tokens.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    entropy_threshold: float | None = 0.4
    position_penalty: float = 0.02
    seed: int = 0
    n: int = 1
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # A dict cannot be hashed, and equal parameters hash alike without it.
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict, hash=False)
    bad_words: tuple[str | tuple[int, ...], ...] = ()
    logprobs: int | None = None
    mode: str = "paper"
    draft_budget: float = 2.0

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _as_words(self.bad_words))
        self._check_mode()
        self._check_numbers()
        self._check_counts()
        if not all(isinstance(s, str) and s for s in self.stop):
            raise InputError("stop: expected non-empty strings")
        if not all(map(_is_token_id, self.stop_token_ids)):
            raise InputError("stop_token_ids: expected token ids")
        if not isinstance(self.ignore_eos, bool):
            raise InputError(f"ignore_eos: expected true or false, not {self.ignore_eos!r}")

    def _number(self, name: str, low: float, high: float, *, integer: bool = False) -> None:
        value = getattr(self, name)
        kinds = (int,) if integer else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            what = "an integer" if integer else "a number"
            bounds = f"of at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
            raise InputError(f"{name}: expected {what} {bounds}, not {value!r}")

    def _check_mode(self) -> None:
        if self.mode not in MODES:
            raise InputError(f"mode: expected one of {', '.join(MODES)}, not {self.mode!r}")
        if self.mode == "verified":
            # Both look at a whole window, where drafts stand that may yet be rejected.
            for name, given in (("penalties", self.has_penalty), ("bad_words", self.bad_words)):
                if given:
                    raise InputError(f"{name}: not in mode 'verified'; mode 'ar' has them")

    def _check_numbers(self) -> None:
        number = self._number
        number("temperature", 0, 1e6)
        number("top_p", 0, 1)
        number("top_k", 0, float("inf"), integer=True)
        number("max_tokens", 1, float("inf"), integer=True)
        number("position_penalty", 0, 1e6)
        number("draft_budget", 0, 1e6)
        number("seed", 0, 2**32 - 1, integer=True)
        if self.entropy_threshold is not None:
            number("entropy_threshold", 0, 1e6)
        if self.top_p == 0:
            raise InputError("top_p: expected a number above 0")
        number("repetition_penalty", 0, 1e6)
        if self.repetition_penalty == 0:
            raise InputError("repetition_penalty: expected a number above 0")
        number("presence_penalty", -2, 2)
        number("frequency_penalty", -2, 2)

    def _check_counts(self) -> None:
        self._number("n", 1, MOST_SAMPLES, integer=True)
        if self.n > 1 and self.temperature == 0:
            raise InputError(
                f"n: expected 1 at temperature 0, where all samples are equal, not {self.n}"
            )
        self._number("min_tokens", 0, float("inf"), integer=True)
        if self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens: expected at most max_tokens, {self.max_tokens}, not {self.min_tokens}"
            )
        if self.logprobs is not None:
            self._number("logprobs", 0, MOST_LOGPROBS, integer=True)

    @property
    def has_penalty(self) -> bool:
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or penalties != (0, 0)


def _is_token_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _as_bias(given: Any) -> dict[int, float]:
    """``logit_bias`` by token id; JSON has no keys but texts, so ids may be written as such."""
    refusal = "logit_bias: expected an object of token ids and numbers from -100 to 100"
    if not isinstance(given or {}, Mapping):
        raise InputError(f"{refusal}, not {given!r}")
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not _is_token_id(token) or not number or not -100 <= value <= 100:
            raise InputError(f"{refusal}, not {key!r}: {value!r}")
        bias[token] = value
    return bias


def _as_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    words: list[str | tuple[int, ...]] = []
    if given is not None and not isinstance(given, str | list | tuple):
        raise InputError(f"bad_words: expected texts or lists of token ids, not {given!r}")
    for word in (given,) if isinstance(given, str) else given or ():
        if isinstance(word, str) and word.strip():
            words.append(word)
        elif isinstance(word, list | tuple) and word and all(map(_is_token_id, word)):
            words.append(tuple(word))
        else:
            raise InputError(f"bad_words: expected texts or lists of token ids, not {word!r}")
    return tuple(words)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowParams:
    """`SamplingParams` of a batch as arrays ``[B]``, and each row's window.

    ``entropy_threshold`` is −inf for None: then no entropy lies below it. ``stop_ids`` is
    int32 ``[B, N]``, filled up with `NO_TOKEN`.

    What stands behind it is None where no row of the batch has the option, and then the
    compiled program knows nothing of it. ``bias_ids`` and ``bias`` are ``[B, N]``,
    ``bad_words`` is ``[B, N, L]``; ``prompt [B, S]`` is there where penalties are. All are
    filled up with `NO_TOKEN`. ``verified`` is bool ``[B]``, ``draft_budget``
    stands beside it.
    """

    window: Array
    temperature: Array
    top_p: Array
    top_k: Array
    max_tokens: Array
    entropy_threshold: Array
    position_penalty: Array
    seed: Array
    stop_ids: Array
    verified: Array | None = None
    draft_budget: Array | None = None
    min_tokens: Array | None = None
    bias_ids: Array | None = None
    bias: Array | None = None
    bad_words: Array | None = None
    repetition_penalty: Array | None = None
    presence_penalty: Array | None = None
    frequency_penalty: Array | None = None
    prompt: Array | None = None

    @property
    def anchored(self) -> Array:
        """bool ``[B]``: rows whose every token is the autoregressive one, chosen behind all tokens
        before it. Their window begins with the last token of the text."""
        return (self.window == 0) if self.verified is None else (self.window == 0) | self.verified


def entropy(logits: Array) -> Array:
    """Shannon entropy in nats, float32 ``[...]``, of the softmax of ``logits [..., V]``.

    A logit of −inf has probability 0 and adds nothing.
    """
    logits = logits.astype(jnp.float32)
    shifted = logits - logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(shifted)
    total = weights.sum(axis=-1)
    energy = jnp.where(weights > 0, weights * shifted, 0.0).sum(axis=-1)
    return jnp.log(total) - energy / total


def fill_rule(
    entropies: Array, slots: Array, is_mask: Array, threshold: Array, penalty: Array
) -> Array:
    """The masks to fill in this forward (WeDLM section 5).

    Args:
      entropies: float32 ``[B, W]``.
      slots: int32 ``[B, W]``, each candidate's logical slot; the first is the first mask.
      is_mask: bool ``[B, W]``, False where a candidate is not there.
      threshold, penalty: τ and λ, ``[B]``.

    Returns:
      bool ``[B, W]``: every mask with H + λ·distance < τ, or the single smallest.
    """
    distance = (slots - slots[:, :1]).astype(jnp.float32)
    adjusted = jnp.where(is_mask, entropies + penalty[:, None] * distance, jnp.inf)
    below = adjusted < threshold[:, None]
    single = jnp.arange(slots.shape[1]) == jnp.argmin(adjusted, axis=-1)[:, None]
    return jnp.where(below.any(axis=-1, keepdims=True), below, single & is_mask)


def choose_tokens(logits: Array, slots: Array, forwards: Array, params: RowParams) -> Array:
    """The token each position would be filled with: int32 ``[B, W]``.

    Args:
      logits: float32 ``[B, W, V]``.
      slots, forwards: int32 ``[B, W]``; with the row's seed they name the random stream of
        each, so a row draws the same numbers in any batch.
    """
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def sample() -> Array:
        def draw(kept: Array, row_slots: Array, row_forwards: Array, seed: Array) -> Array:
            by_forward = jax.vmap(partial(jax.random.fold_in, jax.random.key(seed)))(row_forwards)
            keys = jax.vmap(jax.random.fold_in)(by_forward, row_slots)
            return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)

        kept = logits / jnp.maximum(params.temperature, 1e-6)[:, None, None]
        # Sorting the vocabulary costs more than all else here: only where a row asks for it.
        kept = jax.lax.cond(
            ((params.top_k > 0) | (params.top_p < 1)).any(),
            lambda kept: jax.vmap(truncate)(kept, params.top_k, params.top_p),
            lambda kept: kept,
            kept,
        )
        drawn = jax.vmap(draw)(kept, slots, forwards, params.seed)
        return jnp.where(params.temperature[:, None] > 0, drawn, greedy)

    return jax.lax.cond((params.temperature > 0).any(), sample, lambda: greedy)


def truncate(logits: Array, top_k: Array, top_p: Array) -> Array:
    """Sets to −inf what top-k, then top-p of the rest, leave out.

    Args:
      logits: ``[..., V]``, already divided by the temperature.
      top_k: scalar, 0 for all. Exactly so many stay; of equal logits the lower ids.
      top_p: scalar in (0, 1].
    """
    vocab = logits.shape[-1]
    order = jnp.argsort(-logits, axis=-1, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    k = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)
    ranked = jnp.where(jnp.arange(vocab) < k, ranked, -jnp.inf)
    probability = jax.nn.softmax(ranked, axis=-1)
    # What stands before a token must not yet reach top_p; the first always stays.
    before = jnp.cumsum(probability, axis=-1) - probability
    ranked = jnp.where((before < top_p) | (jnp.arange(vocab) == 0), ranked, -jnp.inf)
    return jnp.take_along_axis(ranked, jnp.argsort(order, axis=-1), axis=-1)
