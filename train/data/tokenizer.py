"""Makes tokenizers: byte-level BPE in Hugging Face's files, with a chat template and a mask."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)
"""Tokens of a tokenizer that has learnt nothing: the specials and a token for each byte."""

# Words with one leading space, numbers, runs of punctuation, line ends, other spaces.
# A number never holds its space (punctuation before it does), so it is the same token
# everywhere; and a number of up to three digits can be one token, so that what follows it
# stands at a known position, which parallel filling needs.
WORD_PATTERN = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+(?: (?=\p{N}))?|\n+|\s+"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tokenizer(
    texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Learns byte-level BPE of ``vocab_size`` tokens, specials and all 256 bytes included; fewer if
    the texts do not have as many.

    Any text round-trips: what has no token of its own is spelled in bytes. The same texts in the
    same order give the same tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORD_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, longest: int = 1024) -> None:
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` as `transformers` reads them.

    Args:
      longest: tokens of a text above which transformers warns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "mask_token": "<|mask|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
    }
    text = json.dumps(settings, indent=2, ensure_ascii=False)
    (folder / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")
