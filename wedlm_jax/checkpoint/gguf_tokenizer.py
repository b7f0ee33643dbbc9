"""The tokenizer of a GGUF file, in Hugging Face's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from wedlm_jax.errors import InputError

CONTROL, USER_DEFINED, UNUSED, BYTE = 3, 4, 5, 6
"""Types of tokens there that are treated apart; an unused one fills a padded vocabulary."""

_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_QWEN2 = rf"{_WORDS}|\p{{N}}|{_REST}"
_LLAMA3 = rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How texts are cut before pairs are merged: the pattern of the words, None for that of GPT-2,
# or "digits" for GPT-2's behind single digits.
SPLITS: dict[str, str | None] = {
    "gpt-2": None,
    "smollm": "digits",
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _LLAMA3,
    "tekken": _TEKKEN,
}
BEGINS_TEXTS = ("llama-bpe", "llama3", "llama-v3", "tekken")
"""Those whose texts begin with the BOS token unless the file says otherwise. Their words that are
tokens are not merged from pairs, either."""


def write_tokenizer(path: Path, metadata: Mapping[str, Any], folder: Path) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json``, the chat template in the latter.

    Args:
      path: of the file, for messages.
      metadata: what it says, by key.
      folder: where to write.

    Raises:
      InputError: it has no tokenizer, or one of a kind that is not supported.
    """
    said = {
        name.removeprefix("tokenizer.ggml."): value
        for name, value in metadata.items()
        if name.startswith("tokenizer.ggml.")
    }
    kind, tokens = said.get("model"), said.get("tokens")
    if kind not in ("gpt2", "llama") or not tokens:
        raise InputError(f"{path}: tokenizer {kind!r} is not supported (only gpt2, llama)")
    types = said.get("token_type") or [1] * len(tokens)
    known = {token: i for i, token in enumerate(tokens) if types[i] != UNUSED}
    if kind == "gpt2":
        tokenizer, begins = _byte_level(path, said, known)
    else:
        tokenizer, begins = _sentencepiece(said, known), True
    for special in (True, False):
        wanted = CONTROL if special else USER_DEFINED
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, i in known.items()
            if types[i] == wanted
        ]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    names = {
        name: _token(tokens, said.get(f"{key}_token_id"))
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    if (bos := names["bos"]) is not None and said.get("add_bos_token", begins):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, known[bos])]
        )
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in names.items() if token is not None},
        "clean_up_tokenization_spaces": False,
    }
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        settings["chat_template"] = template
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _token(tokens: list[str], number: Any) -> str | None:
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _byte_level(
    path: Path, said: Mapping[str, Any], known: dict[str, int]
) -> tuple[Tokenizer, bool]:
    """Returns a BPE of bytes, and whether its texts begin with the BOS token by default."""
    name = said.get("pre")
    if name not in SPLITS:
        raise InputError(
            f"{path}: pre-tokenizer {name!r} is not supported (only {', '.join(SPLITS)})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in said.get("merges", ())]
    begins = name in BEGINS_TEXTS
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, ignore_merges=begins))
    split = SPLITS[name]
    steps: list[Any] = []
    if split == "digits":
        steps = [pre_tokenizers.Digits(individual_digits=True)]
    elif split is not None:
        steps = [pre_tokenizers.Split(Regex(split), behavior="isolated")]
    by_pattern = split not in (None, "digits")
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not by_pattern))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if split == _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, begins


def _sentencepiece(said: Mapping[str, Any], known: dict[str, int]) -> Tokenizer:
    """Returns a BPE of characters, spaces written as "▁", that falls back to bytes."""
    merges = [tuple(merge.split(" ", 1)) for merge in said.get("merges", ())]
    unknown = _token(said["tokens"], said.get("unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=known,
            merges=merges or _merges(known, said.get("scores") or []),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    steps: list[Any] = [normalizers.Replace(" ", "▁")]
    ends: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if said.get("add_space_prefix", True):
        steps.insert(0, normalizers.Prepend("▁"))
        ends.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(ends)
    return tokenizer


def _merges(known: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Returns the pairs that SentencePiece would merge, the first of them first: those that make
    the token of the highest score."""
    ranked = []
    for token, number in known.items():
        score = scores[number] if number < len(scores) else -float(number)
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-score, known[left], known[right], left, right))
    return [(left, right) for *_, left, right in sorted(ranked)]
