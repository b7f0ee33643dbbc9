"""`python -m examples.embedded.words OLD NEW`: gives every word of the corpus a token of its own.

Masked positions are filled at once. Where a word has several tokens, neighbours that do not see
each other may take pieces of different words: "Octobmber", of "October" and "November". So the
checkpoint OLD is written to NEW with one more token for each word that has several; existing ids
and the tokens of all other text stay as they are. NEW is of little use until it is trained.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from examples.embedded.corpus import REGIMES, generate
from train.data.tokenizer import save_tokenizer
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.names import arrays_from_model, model_from_arrays
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process
from wedlm_jax.host.storage import why_absent

SAMPLES = 20_000
"""Samples of each regime: the rarest word is in a few dozen of them."""
CHAT_PROMPT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def add_words(old: Path, new: Path) -> int:
    """Writes the checkpoint with the longer vocabulary; returns how many words were added.

    Raises:
      InputError: ``old`` is no checkpoint, has no tokenizer or one of another size, a head of its
        own, or every word already.
    """
    if not (old / "tokenizer.json").exists():
        raise InputError(why_absent(old, "tokenizer.json"))
    model = load_checkpoint(old, dtype=jnp.float32)
    if not model.config.tie_word_embeddings:
        raise InputError(f"{old}: expected a head tied to the embedding")
    tokenizer = Tokenizer.from_file(str(old / "tokenizer.json"))
    if tokenizer.get_vocab_size() != model.config.vocab_size:
        raise InputError(
            f"{old}: {tokenizer.get_vocab_size()} tokens in the tokenizer, "
            f"{model.config.vocab_size} in config.json"
        )
    words = split_words(tokenizer, corpus_texts(SAMPLES))
    if not words:
        raise InputError(f"{old}: every word of the corpus is one token already")
    arrays = arrays_from_model(model)
    rows = np.asarray(arrays["embed_tokens"])
    arrays["embed_tokens"] = jnp.asarray(np.concatenate([rows, word_rows(tokenizer, words, rows)]))
    config = dataclasses.replace(model.config, vocab_size=len(rows) + len(words))
    with tempfile.TemporaryDirectory() as temporary:
        save_tokenizer(with_words(tokenizer, words), Path(temporary))
        longer = model_from_arrays(config, arrays)
        save_checkpoint(longer, config, new, dtype="float32", tokenizer_from=temporary)
    return len(words)


def corpus_texts(count: int, seed: int = 5) -> Iterator[str]:
    """Yields prompts as a chat asks them, and answers: ``count`` samples of each regime."""
    for regime in REGIMES:
        for sample in generate(seed, count, split="train", weights={regime: 1.0}):
            yield CHAT_PROMPT.format(prompt=sample.prompt)
            yield sample.answer


def split_words(tokenizer: Tokenizer, texts: Iterator[str]) -> list[str]:
    """Lists the words that have several tokens, sorted, as the tokenizer's vocabulary spells them:
    a leading space is `Ġ`. Numbers and punctuation are not words: they stay as they are."""
    words = {word for text in texts for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)}
    letters = (word for word in sorted(words) if word.removeprefix("Ġ").isalpha())
    return [word for word in letters if len(tokenizer.model.tokenize(word)) > 1]


def with_words(tokenizer: Tokenizer, words: list[str]) -> Tokenizer:
    """Returns the tokenizer with each word as one more token, after the existing ones.

    `ignore_merges` takes a word in the vocabulary as one token, and splits all others by the
    merges. No merge is added, so no other text changes.
    """
    content = json.loads(tokenizer.to_str())
    first = tokenizer.get_vocab_size()
    content["model"]["vocab"] |= {word: first + i for i, word in enumerate(words)}
    content["model"]["ignore_merges"] = True
    return Tokenizer.from_str(json.dumps(content))


def word_rows(tokenizer: Tokenizer, words: list[str], rows: np.ndarray) -> np.ndarray:
    """Returns initial embeddings, ``[words, D]``: the mean of the pieces' ``rows [V, D]``, scaled
    to their mean length, since a mean is shorter and the head is the same matrix."""
    pieces = [[token.id for token in tokenizer.model.tokenize(word)] for word in words]
    means = np.stack([rows[ids].mean(0) for ids in pieces])
    lengths = np.stack([np.linalg.norm(rows[ids], axis=1).mean() for ids in pieces])
    return means * (lengths / np.linalg.norm(means, axis=1))[:, None]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.embedded.words", description=__doc__)
    add = parser.add_argument
    add("old", type=Path, metavar="OLD", help="checkpoint with a tokenizer: a run's export")
    add("new", type=Path, metavar="NEW", help="folder to write, from which the next stage starts")
    options = parser.parse_args(arguments)
    added = add_words(options.old, options.new)
    print(f"{options.new}: {added} words added")
    return 0


if __name__ == "__main__":
    exit_process(run_command("python -m examples.embedded.words", lambda: main(sys.argv[1:])))
