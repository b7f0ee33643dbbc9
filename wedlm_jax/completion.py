"""The result of one prompt; the engine leaves its text out, `wedlm_jax.llm.LLM` adds it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.errors import did_you_mean

ELSEWHERE = {
    "outputs": "use .text, .token_ids and .finish_reason in place of vLLM's outputs[0]; "
    ".samples has all n completions",
    "cumulative_logprob": "it is sum(token.logprob for token in completion.logprobs)",
    "prompt": "prompts are not kept: completions come in the order of the prompts",
    "prompt_token_ids": "prompts are not kept: completions come in the order of the prompts",
}
"""Attributes of other engines' results, and their equivalents here."""


class Drafts(NamedTuple):
    """Counts of drafts by their source: how many were checked, and how many accepted."""

    masks: int = 0
    masks_accepted: int = 0
    lookup: int = 0
    lookup_accepted: int = 0

    @staticmethod
    def read(codes: Sequence[int] | np.ndarray) -> Drafts:
        """Returns the sum of counts encoded by `wedlm_jax.decode.loop.draft_code`."""
        code = np.asarray(codes, np.int64)
        parts = (code & 0xFFF, code >> 12 & 0xFFF, code >> 24 & 0xF, code >> 28 & 0xF)
        return Drafts(*(int(part.sum()) for part in parts))

    def accepting(self, most: int) -> int:
        """Returns the code of a forward's drafts of which no more than ``most`` were accepted."""
        accepted = min(self.masks_accepted, most), min(self.lookup_accepted, most)
        return self.masks | accepted[0] << 12 | self.lookup << 24 | accepted[1] << 28

    def plus(self, other: Drafts) -> Drafts:
        """Returns the sum of both counts."""
        return Drafts(*(one + more for one, more in zip(self, other, strict=True)))


def total_drafts(completions: Iterable[Completion]) -> Drafts:
    """Returns the drafts of all completions together."""
    return Drafts.read([code for one in completions for code in one.drafts_at])


@dataclasses.dataclass(frozen=True)
class Completion:
    """The result of one prompt.

    Attributes:
      text: the completion without stop token and stop string; None without a tokenizer, and from
        the engine, which knows only token ids.
      token_ids: committed tokens, a stop token included; with a stop string, those up to its end.
      finish_reason: "stop", "length", or None while streaming.
      num_forwards: decode forwards, which are those that could commit tokens. AR takes one per
        token, of which the first computes the prompt's last token; earlier forwards, which compute
        nothing but prompt, are not counted.
      num_token_instances: active window slots, summed over those forwards; AR has one per forward.
      logprobs: log-probabilities of ``token_ids``; None unless requested.
      further: the prompt's other samples if ``SamplingParams.n`` is above 1; this is the first.
      num_cached_tokens: prompt tokens found in the prefix cache.
      forwards_at, instances_at: ``num_forwards`` and ``num_token_instances`` when each of
        ``token_ids`` was committed.
      drafts_at: the drafts that were checked then, encoded; `drafts` is their sum.
    """

    text: str | None
    token_ids: list[int]
    finish_reason: str | None
    num_forwards: int
    num_token_instances: int
    logprobs: list[TokenLogprob] | None = None
    further: tuple[Completion, ...] = ()
    num_cached_tokens: int = 0
    forwards_at: list[int] = dataclasses.field(default_factory=list, repr=False)
    instances_at: list[int] = dataclasses.field(default_factory=list, repr=False)
    drafts_at: list[int] = dataclasses.field(default_factory=list, repr=False)

    if not TYPE_CHECKING:  # a type checker must still report unknown attributes

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an error that suggests what was meant by an unknown attribute."""
            if name.startswith("_"):
                raise AttributeError(f"a Completion has no {name!r}")
            known = [one for one in dir(self) if not one.startswith("_")]
            hint = ELSEWHERE.get(name) or did_you_mean(name, known)
            raise AttributeError(f"a Completion has no {name!r}; {hint}")

    @property
    def samples(self) -> tuple[Completion, ...]:
        """All ``n`` completions of the prompt, this one first."""
        return (self, *self.further)

    @property
    def confidence(self) -> list[float] | None:
        """The probability that each of ``token_ids`` had when it was chosen; None if ``logprobs``
        is None."""
        if self.logprobs is None:
            return None
        return [math.exp(token.logprob) for token in self.logprobs]

    @property
    def tokens_per_forward(self) -> float:
        """Completion tokens over decode forwards: 1 in AR."""
        return len(self.token_ids) / max(self.num_forwards, 1)

    @property
    def drafts(self) -> Drafts:
        """The drafts that were checked and accepted; all 0 outside of mode "verified"."""
        return Drafts.read(self.drafts_at)

    @property
    def p_cache(self) -> float:
        """Completion tokens over processed token instances (WeDLM section 3)."""
        return len(self.token_ids) / max(self.num_token_instances, 1)

    def cut(self, length: int) -> Completion:
        """Returns the completion as if it had stopped after its first ``length`` (at least 1)
        tokens; its text is unchanged."""
        # Drafts that the last of these forwards accepted, and that are cut off, do not count.
        first, drafts = self.forwards_at.index(self.forwards_at[length - 1]), list(self.drafts_at)
        if drafts:
            drafts[first] = Drafts.read(drafts[first : first + 1]).accepting(length - first - 1)
        return dataclasses.replace(
            self,
            token_ids=self.token_ids[:length],
            finish_reason="stop",
            num_forwards=self.forwards_at[length - 1],
            num_token_instances=self.instances_at[length - 1],
            forwards_at=self.forwards_at[:length],
            instances_at=self.instances_at[:length],
            drafts_at=drafts[:length],
            logprobs=None if self.logprobs is None else self.logprobs[:length],
        )


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A part of a streamed completion: the new ``text`` and ``token_ids``, and the completion so
    far."""

    text: str
    token_ids: list[int]
    completion: Completion
