"""`SamplingParams`: how one prompt is decoded.

Each field states its meaning, its valid values and its array on the device once. The checks of
`SamplingParams`, the arrays of `wedlm_jax.decode.options`, command-line flags, checks of JSON and
the tables in the documentation are all generated from that (see `OPTIONS`).
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Self

from wedlm_jax.errors import InputError, refuse_unknown
from wedlm_jax.option_values import (
    Option,
    as_bias,
    as_schema,
    as_tuple,
    as_words,
    is_text,
    is_token_id,
    options_of,
)

NO_TOKEN = -1
"""Pads arrays of token ids."""

MOST_LOGPROBS = 20
"""The maximum number of alternatives reported for a token."""

MOST_SAMPLES = 128
"""The maximum number of completions of one prompt; its result waits for the last of them."""

MODES = ("paper", "verified", "ar")
DEFAULT_MODE = "verified"
DRAFTS = ("auto", "both", "lookup", "masks", "none")


# What several fields have in common: a number on the device, where every program or those with a
# trait have it.
_NonNegative = partial(Option, low=0, high=1e6, array="float32")
_Share = partial(Option, low=0, high=1, array="float32", trait="truncated")
_Penalty = partial(Option, low=-2, high=2, array="float32", trait="penalties")


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How one prompt is decoded.

    Each field's meaning is stated with the field; docs/sampling.md explains what it means when
    several masks are filled at a time.

    Raises:
      InputError: a value is not valid; the message names the field and what was expected.
    """

    temperature: Annotated[
        float,
        _NonNegative(
            "0 takes the most likely token; otherwise the logits are divided by it", trait="sampled"
        ),
    ] = 0.0
    top_p: Annotated[
        float,
        _Share(
            "sample from the smallest set of tokens whose total probability reaches this; 1 is all",
            above=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Option(
            "number of most likely tokens to sample from, before top_p; 0 is all (also -1, as in "
            "vLLM)",
            low=0,
            array="int32",
            trait="truncated",
        ),
    ] = 0
    min_p: Annotated[
        float,
        _Share(
            "sample from tokens whose probability is at least this share of the most likely "
            "token's, before top_k; 0 is all"
        ),
    ] = 0.0
    max_tokens: Annotated[int, Option("maximum completion tokens", low=1, array="int32")] = 256
    stop: Annotated[
        tuple[str, ...],
        Option(
            "texts that end the completion; matched on the decoded text and trimmed from it",
            none="none",
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Option(
            "token ids that end the completion, in addition to the model's end of text; they stay "
            "in token_ids, not in text",
            none="none",
        ),
    ] = ()
    ignore_eos: Annotated[
        bool, Option("continue after the model's end of text, until max_tokens or another stop")
    ] = False
    entropy_threshold: Annotated[
        float | None,
        _NonNegative(
            "τ of mode paper, in nats: a mask is filled if its entropy plus penalty is below it",
            none="one mask is filled per forward",
            trait="paper",
        ),
    ] = 0.4
    position_penalty: Annotated[
        float,
        _NonNegative(
            "λ of mode paper, in nats: a mask's penalty per slot of distance from the first",
            trait="paper",
        ),
    ] = 0.02
    seed: Annotated[
        int | None,
        Option(
            "random seed; the same seed gives the same tokens in any batch",
            low=0,
            high=2**32 - 1,
            none="a new seed for each call, as with -1",
            array="uint32",
            trait="sampled",
        ),
    ] = 0
    n: Annotated[
        int,
        Option(
            "number of completions of the prompt, at most 128, each with its own seed; above 1 "
            "needs a temperature above 0",
            low=1,
            high=MOST_SAMPLES,
        ),
    ] = 1
    min_tokens: Annotated[
        int,
        Option(
            "before this many completion tokens, no stop token is chosen and no stop text counts",
            low=0,
            array="int32",
            trait="min_tokens",
        ),
    ] = 0
    repetition_penalty: Annotated[
        float,
        Option(
            "divides positive and multiplies negative logits of tokens in the prompt or the "
            "completion; 1 changes nothing",
            low=0,
            high=1e6,
            above=True,
            array="float32",
            trait="penalties",
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, _Penalty("subtracted from the logits of tokens in the completion")
    ] = 0.0
    frequency_penalty: Annotated[
        float, _Penalty("subtracted once for each occurrence of a token in the completion")
    ] = 0.0
    # A dict cannot be hashed; without it equal parameters still have equal hashes.
    logit_bias: Annotated[
        Mapping[int, float],
        Option("numbers added to the logits of token ids, before anything else", none="none"),
    ] = dataclasses.field(default_factory=dict, hash=False)
    bad_words: Annotated[
        tuple[str | tuple[int, ...], ...],
        Option("texts or token-id sequences that never occur in the completion", none="none"),
    ] = ()
    json_schema: Annotated[
        str | None,
        Option(
            "a JSON schema, as an object or as text: the completion is JSON that matches it; not "
            "in mode paper",
            text="TEXT",
            none="any text",
        ),
    ] = None
    regex: Annotated[
        str | None,
        Option(
            "a regular expression that matches the whole completion; not in mode paper",
            text="REGEX",
            none="any text",
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        Option(
            "return the log-probability of each token, and of this many of the most likely "
            "tokens at its position",
            low=0,
            high=MOST_LOGPROBS,
            none="neither",
        ),
    ] = None
    mode: Annotated[
        str,
        Option(
            "ar: one token per forward, autoregressively. verified: the same tokens as ar in fewer "
            "forwards, since each forward checks several drafts. paper: filled masks are committed "
            "unchecked, so tokens may differ from ar. A window of 0 turns every mode into ar",
            choices=MODES,
        ),
    ] = DEFAULT_MODE
    draft: Annotated[
        str,
        Option(
            "source of drafts in mode verified; it does not change the tokens. masks: filled in by "
            "a model trained on masks, or with a drafter. lookup: copied from an earlier "
            "occurrence of the last tokens in the text. both: masks, and copies that save time "
            "where no mask drafts. none: no drafts, as in mode ar. auto: masks if the model was "
            "trained on them, else lookup where it saves time; with a drafter, both, and no masks "
            "where copies alone are faster",
            choices=DRAFTS,
        ),
    ] = "auto"
    draft_budget: Annotated[
        float | None,
        _NonNegative(
            "in mode verified, the maximum total entropy of a window's drafts, in nats; a larger "
            "budget drafts more and rejects more, and the tokens are the same",
            none="2, or 4 where there are backup masks",
            trait="verified",
        ),
    ] = None

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Refuses unknown fields, with a hint that Python's message lacks."""
        refuse_unknown(given, tuple(OPTIONS), "sampling field")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        object.__setattr__(self, "stop", as_tuple("stop", stop, "non-empty strings", is_text))
        ids = as_tuple("stop_token_ids", self.stop_token_ids, "token ids", is_token_id)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(self, "logit_bias", as_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", as_words(self.bad_words))
        object.__setattr__(self, "json_schema", as_schema(self.json_schema))
        for name, none in (("top_k", 0), ("seed", None)):
            if getattr(self, name) == -1:  # vLLM's "all" and "any"
                object.__setattr__(self, name, none)
        for name, option in OPTIONS.items():
            option.check(name, getattr(self, name))
        if self.n > 1 and self.temperature == 0:
            raise InputError(
                f"n: expected 1 at temperature 0, where all samples are the same, not {self.n}"
            )
        if self.min_tokens > self.max_tokens:
            raise InputError(
                f"min_tokens: expected at most max_tokens, {self.max_tokens}, not {self.min_tokens}"
            )
        if self.grammar is not None:
            self._check_grammar(self.grammar[0])

    def _check_grammar(self, name: str) -> None:
        if name != "regex" and self.regex is not None:
            raise InputError(f"regex: cannot be combined with {name}")
        if self.mode == "paper":
            raise InputError(
                f"{name}: expected mode verified or ar, which choose tokens from left to right, "
                "not paper"
            )
        for other in ("ignore_eos", "min_tokens", "bad_words"):
            if getattr(self, other):
                raise InputError(
                    f"{other}: cannot be combined with {name}: they may forbid every token"
                )

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The name and value of the field that constrains the completion; None if none does."""
        for name in ("json_schema", "regex"):
            if (value := getattr(self, name)) is not None:
                return name, value
        return None

    @property
    def has_penalty(self) -> bool:
        """Whether any of the three penalties has an effect."""
        penalties = (self.presence_penalty, self.frequency_penalty)
        return self.repetition_penalty != 1 or penalties != (0, 0)

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are sampled from a part of the vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


_, *_FIELDS = inspect.signature(SamplingParams.__init__).parameters.values()
# `__new__` hides the fields from editors and `help`.
SamplingParams.__signature__ = inspect.Signature(_FIELDS)  # type: ignore[attr-defined]


OPTIONS: Mapping[str, Option] = options_of(SamplingParams)
"""The `Option` of every field, in the order of the fields."""


def sample_seed(seed: int, sample: int) -> int:
    """Returns the seed of a prompt's sample, counted from 0; the first has the prompt's seed."""
    if sample == 0:
        return seed
    import numpy as np  # not at the top, to keep a command's --help fast

    # Not seed + sample, since neighbouring seeds are often used for other prompts.
    return int(np.random.SeedSequence([seed, sample]).generate_state(1)[0])
