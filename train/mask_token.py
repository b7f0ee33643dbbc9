"""Chooses the mask token, once, when training starts; `config.json` keeps it.

A mask token must never occur in texts, because the model reads it as "not known yet". Qwen's
vocabularies are padded to a round size, so they have rows that no token uses, and the first of them
is taken. (The published WeDLM checkpoints use 151665, the first such row of Qwen2.5. In Qwen3's
tokenizer that id is `<tool_response>`.)

The vocabularies of Llama and SmolLM have no such row. For them a reserved token is taken, which
does not occur in texts.
"""

from __future__ import annotations

import re
from pathlib import Path

from tokenizers import Tokenizer

from wedlm_jax.config import ModelConfig, read_object
from wedlm_jax.errors import InputError

DEFAULT_NAME = "<|mask|>"

RESERVED = (
    r"<\|reserved_special_token_\d+\|>",  # Llama 3
    r"\[control_\d+\]",  # Mistral
    r"<reponame>",  # for source code: SmolLM, StarCoder
    r"<file_sep>",
)
"""Patterns of tokens that vocabularies reserve, or that no conversation contains. The first pattern
with a match is taken; of numbered tokens the last, since finetuned models use the first ones
first."""


def named_mask_token(folder: Path) -> str | None:
    """Returns the mask token that a `tokenizer_config.json` names."""
    value = (read_object(folder / "tokenizer_config.json") or {}).get("mask_token")
    return value.get("content") if isinstance(value, dict) else value


def choose_mask_token(
    tokenizer: Tokenizer,
    config: ModelConfig,
    requested: str | None = None,
    *,
    own: str | None = None,
) -> int:
    """Returns the id of the mask token to train with.

    This is the first of these that exists: the requested token; the one that the model was trained
    with; the tokenizer's own; the first row of the vocabulary that no token uses; a token in
    `RESERVED`; the unknown token, if the tokenizer falls back to bytes and so never produces it.

    Args:
      config: the starting model's config; its ``mask_token_id`` is None if it has none yet.
      requested: a token's text, or an id as digits.
      own: the mask token that the tokenizer names; by default `<|mask|>`, if there is one.

    Raises:
      InputError: the token ends texts, is a special token with another meaning, occurs in ordinary
        text or does not exist; or there is no unused row of the vocabulary and no reserved token.
    """
    own_id = tokenizer.token_to_id(own or DEFAULT_NAME)
    if requested is not None:
        named = _requested_id(tokenizer, config, requested)
    elif config.mask_token_id is not None:
        named = config.mask_token_id
    elif own_id is not None and own_id < config.vocab_size:
        named = own_id
    else:
        return _unused_id(tokenizer, config)
    _refuse_meaningful(tokenizer, config, named, own_id)
    if requested is not None and is_ordinary(tokenizer, named):
        raise InputError(
            f"mask token {_shown(tokenizer, named)}: occurs in ordinary text; expected a token "
            "that was added to the tokenizer, or an id that no token has"
        )
    return named


def _unused_id(tokenizer: Tokenizer, config: ModelConfig) -> int:
    """Returns the first row of the vocabulary that no token uses, or else a reserved token."""
    used: set[int | None] = {*tokenizer.get_vocab().values(), *config.eos_token_ids}
    used |= {config.pad_token_id, config.bos_token_id}
    free = next((row for row in range(config.vocab_size) if row not in used), None)
    free = _in_reserve(tokenizer, config) if free is None else free
    if free is None:
        raise InputError(
            f"mask token: all {config.vocab_size:,} rows of the vocabulary are used by tokens; "
            "set model.mask_token to an added token that does not occur in the data"
        )
    return free


def describe_mask_token(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a mask token's id and name: "151669 (unused by the tokenizer)"."""
    name = tokenizer.id_to_token(token_id)
    return f"{token_id} ({'unused by the tokenizer' if name is None else name})"


def is_ordinary(tokenizer: Tokenizer, token_id: int) -> bool:
    """Returns whether an id is a token that ordinary text is made of: neither added nor unused."""
    added = tokenizer.get_added_tokens_decoder()
    return token_id not in added and tokenizer.id_to_token(token_id) is not None


def _requested_id(tokenizer: Tokenizer, config: ModelConfig, requested: str) -> int:
    # Digits are an id. As text they would be an ordinary token, which cannot be the mask.
    digits = requested.isascii() and requested.isdecimal()
    token_id = int(requested) if digits else tokenizer.token_to_id(requested)
    if token_id is None:
        raise InputError(
            f"mask token {requested!r}: the tokenizer has no such token; expected one of its added "
            "tokens, or the id of an unused row"
        )
    if token_id >= config.vocab_size:
        raise InputError(
            f"mask token {requested!r}: id {token_id} lies outside the model's vocabulary of "
            f"{config.vocab_size:,}"
        )
    return token_id


def _refuse_meaningful(
    tokenizer: Tokenizer, config: ModelConfig, token_id: int, own_id: int | None
) -> None:
    """Refuses a mask token that has another meaning."""
    shown = _shown(tokenizer, token_id)
    if token_id in config.eos_token_ids:
        raise InputError(f"mask token {shown}: ends a text (eos_token_id in config.json)")
    added = tokenizer.get_added_tokens_decoder().get(token_id)
    reserved = added is not None and _rank(tokenizer, added.content) is not None
    if added is not None and added.special and token_id != own_id and not reserved:
        raise InputError(f"mask token {shown}: is a special token with another meaning")


def _rank(tokenizer: Tokenizer, name: str) -> int | None:
    """Returns the rank of a token among the reserved ones; None if it is not reserved."""
    for rank, pattern in enumerate(RESERVED):
        if re.fullmatch(pattern, name):
            return rank
    model = tokenizer.model
    never_met = getattr(model, "byte_fallback", False) and name == getattr(model, "unk_token", None)
    return len(RESERVED) if never_met else None


def _in_reserve(tokenizer: Tokenizer, config: ModelConfig) -> int | None:
    """Returns the id of the best reserved token; None if there is none."""
    taken = {*config.eos_token_ids, config.pad_token_id, config.bos_token_id}
    ranked = [
        (rank, -number)
        for number, added in tokenizer.get_added_tokens_decoder().items()
        if number not in taken
        and number < config.vocab_size
        and (rank := _rank(tokenizer, added.content)) is not None
    ]
    return -min(ranked)[1] if ranked else None


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    name = tokenizer.id_to_token(token_id)
    return str(token_id) if name is None else f"{name!r} ({token_id})"
