"""Loads tokenizers, and trains them: `wedlm tokenizer` learns byte-level BPE from texts and
conversations, and writes Hugging Face's files, with a chat template and a mask token.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from train.data.chunks import Malformed, chunks, find_input, records
from wedlm_jax.errors import InputError, counted, shortened
from wedlm_jax.host.atomic import replacing
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.host.storage import why_absent
from wedlm_jax.records.files import RecordFile, file_size

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
SMALLEST = 256 + len(SPECIAL_TOKENS)
"""The size of a vocabulary that has learnt nothing: the special tokens and one for each byte."""
LARGEST = 2**24
"""More than any vocabulary has; the trainer reserves memory for all of it at once."""

# Words with one leading space, numbers, runs of punctuation, line ends, other spaces.
# A number never holds its space (punctuation before it does), so it is the same token
# everywhere; and a number of up to three digits can be one token, so that what follows it
# has a known position, which parallel filling needs.
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
    """Learns byte-level BPE of ``vocab_size`` tokens, including special tokens and all 256 bytes;
    fewer if the texts do not have that many. The same texts in the same order give the same
    tokenizer."""
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
    """Writes ``tokenizer.json`` and ``tokenizer_config.json`` for `transformers`, which warns of
    texts of more than ``longest`` tokens."""
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


def load_tokenizer(folder: Path) -> Tokenizer:
    """Loads the tokenizer of a folder, without truncation or padding.

    Raises:
      InputError: a file is missing or malformed; the message names it.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        raise InputError(why_absent(folder, path.name))
    try:
        tokenizer = Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except Exception as error:
        # The parser raises a bare Exception.
        reason = shortened(str(error))
        raise InputError(f"{path}: the tokenizer is truncated or malformed ({reason})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


EPILOG = """\
Input is what `wedlm tokenize` reads: .jsonl and .jsonl.gz with "text" or "messages", .txt,
.parquet, .arrayrecord; files and folders. A sample of a few hundred MB is enough.

DIR gets tokenizer.json and tokenizer_config.json, which transformers reads, too: byte-level BPE
(any text round-trips; a token has at most three digits), Qwen's format for conversations
(<|im_start|>ROLE ... <|im_end|>), <|im_end|> as the end of a turn, <|endoftext|> as the end of a
document and as padding, and <|mask|> as the mask token.

It is for models that are trained from scratch. A checkpoint has its own tokenizer.

example:
  wedlm tokenizer --input corpus/ chats.jsonl --vocab-size 32000 --output tokenizer
  wedlm tokenize --input corpus/ --output data/corpus --tokenizer tokenizer --row-length 2048
"""

NO_LIMIT = 10**30
"""The value that transformers uses for a tokenizer without a maximum length."""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="wedlm tokenizer",
        description="Trains a tokenizer, with a chat template, an end token and a mask token.",
        epilog=EPILOG,
    )
    add = made.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders to read")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="size of the vocabulary, including special tokens and all bytes; at least 260",
    )
    return made


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)

    from rich.console import Console

    output = Path(options.output)
    if not SMALLEST <= options.vocab_size <= LARGEST:
        expected = f"{SMALLEST} to {LARGEST:,}"
        raise InputError(f"--vocab-size: expected {expected}, not {options.vocab_size:,}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"{output}: already exists; remove it, or name another folder")
    files = find_input(options.input).files
    print(f"{counted(len(files), 'file')} to read", flush=True)
    bar = ProgressBar("bytes", percent=True, title="reading", console=Console(), every=10.0)
    texts = InputTexts(files, bar)
    with bar:
        tokenizer = train_tokenizer(texts, options.vocab_size)
    if not texts.count:
        why = f"; the first record left out: {texts.left_out[0]}" if texts.left_out else ""
        raise InputError(f"no text in the input{why}")
    with replacing(output) as folder:
        save_tokenizer(tokenizer, folder, longest=NO_LIMIT)
    size = tokenizer.get_vocab_size()
    fewer = "" if size == options.vocab_size else ", all that the input has"
    print(
        f"{output}: {size:,} tokens{fewer}, learnt from {texts.count:,} texts of "
        f"{texts.characters:,} characters"
    )
    if texts.left_out:
        print(f"{counted(len(texts.left_out), 'record')} left out; the first: {texts.left_out[0]}")
    return 0


class InputTexts:
    """Yields the texts of documents and messages, in the order of the input.

    Attributes:
      count, characters: number of texts and characters so far.
      left_out: the records without a text.
    """

    def __init__(self, files: Sequence[RecordFile], bar: ProgressBar):
        self._files, self._bar = files, bar
        self.count = self.characters = 0
        self.left_out: list[Malformed] = []

    def __iter__(self) -> Iterator[str]:
        total, read = sum(map(file_size, self._files)), 0
        for file in self._files:
            for chunk in chunks(file):
                for line, record in records(chunk):
                    if isinstance(record, Malformed):
                        self.left_out.append(record)
                        continue
                    texts = texts_of(record)
                    if not texts:
                        self.left_out.append(Malformed(file.shown, line, "no text or messages"))
                    for text in texts:
                        self.count += 1
                        self.characters += len(text)
                        yield text
                read += chunk.bytes_read
                self._bar.update(read, total=total, text=f"{self.count:,} texts")
        self._bar.update(total, total=total, title="learning", text="merging pairs of tokens")


def texts_of(record: dict[str, Any]) -> list[str]:
    """Returns the texts of a record that a tokenizer can learn from."""
    if "text" in record:
        found: list[Any] = [record["text"]]
    else:
        messages = record.get("messages")
        turns = messages if isinstance(messages, list) else []
        found = [turn.get("content") for turn in turns if isinstance(turn, dict)]
    return [text for text in found if isinstance(text, str) and _is_unicode(text)]


def _is_unicode(text: str) -> bool:
    """Returns whether a text is not empty and has no half of a surrogate pair, which JSON
    allows."""
    try:
        return bool(text.encode("utf-8"))
    except UnicodeEncodeError:
        return False
