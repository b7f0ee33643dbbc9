"""Compiles grammars with the library llguidance, for the tokens of a checkpoint's tokenizer."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from wedlm_jax.errors import InputError, require_extra, shortened
from wedlm_jax.grammar.masks import Matcher
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

LONGEST = 2**18
"""Maximum length of a schema or an expression, in characters."""

KEPT = 128
"""Maximum number of compiled grammars that are kept."""

JSON_OPTIONS: Any = {
    # Limits the whitespace between two tokens. JSON allows any amount, and a model may never stop.
    "whitespace_pattern": r"[ ]|\n[ ]{0,20}",
    # A keyword that is not understood is refused, even if the schema asks to ignore such keywords.
    "lenient": False,
    "coerce_one_of": False,
}


class TokenizerGrammars:
    """Makes matchers for a tokenizer; nothing is loaded before the first grammar arrives.

    Args:
      tokenizer: a tokenizer of `transformers`.
      vocab_size: vocabulary size of the model.
      eos_token_ids: the model's ids that end a completion.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, eos_token_ids: Sequence[int]):
        self._given, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._compiled = functools.lru_cache(maxsize=KEPT)(self._compile)

    def check(self, params: SamplingParams) -> None:
        """Refuses a grammar that cannot be followed; see `wedlm_jax.grammar.masks.Grammars`."""
        if params.grammar is not None:
            self._compiled(*params.grammar)

    def matcher(self, params: SamplingParams) -> Matcher:
        """Returns the matcher of a completion that has no tokens yet."""
        assert params.grammar is not None
        return self._compiled(*params.grammar).deep_copy()

    def fill(self, places: Sequence[tuple[Any, int, list[int]]], masks: np.ndarray) -> None:
        """Writes which tokens are allowed at some places, in parallel threads."""
        from llguidance.numpy import (
            fill_next_token_bitmask_par,
            fill_next_token_bitmask_par_with_draft_tokens,
        )

        rows = masks.view(np.int32)
        # The library refuses an empty list of drafts.
        if without := [(matcher, row) for matcher, row, drafts in places if not drafts]:
            fill_next_token_bitmask_par(self._executor, without, rows)
        if drafted := [place for place in places if place[2]]:
            fill_next_token_bitmask_par_with_draft_tokens(self._executor, drafted, rows)

    @functools.cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._given, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def _compile(self, name: str, text: str) -> LLMatcher:
        require_extra(name, "grammar", "llguidance")
        from llguidance import LLMatcher

        if not self._eos_token_ids:
            raise InputError(f"{name}: this model has no end-of-text token, which a grammar needs")
        if len(text) > LONGEST:
            raise InputError(f"{name}: expected at most {LONGEST} characters, not {len(text)}")
        try:
            if name == "regex":
                grammar = LLMatcher.grammar_from_regex(text)
            else:
                grammar = LLMatcher.grammar_from_json_schema(text, overrides=JSON_OPTIONS)
            tokenizer = self._tokenizer
        except ValueError as error:
            # The library cannot read the tokenizer or the schema; it has no exception type for
            # either.
            raise InputError(f"{name}: {shortened(str(error))}") from None
        wrong = LLMatcher.validate_grammar(grammar, tokenizer)
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        if wrong or matcher.is_error():
            raise InputError(f"{name}: {_reason(wrong or matcher.get_error())}")
        return matcher


def _reason(message: str) -> str:
    """Returns the library's error message, without the excerpt that marks the place."""
    found = re.search(r"^error: (.*)$", message, re.MULTILINE)
    return shortened(found[1] if found else message)
