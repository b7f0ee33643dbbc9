"""Packed rows of the synthetic corpus: generated, tokenised, packed once.

The rows live in one `.npz` beside the run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from train.embedded.corpus import Sample, Split, generate
from train.recipe.config import TrainConfig
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import written_beside
from wedlm_jax.packing import TokenisedSample, pack, row_arrays

CHAT_PROMPT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
CHAT_END = "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """Holds rows in memory: each array ``[rows, row_length]``; ``fill`` is the share of real
    tokens; ``file`` is where they were saved, if they were."""

    arrays: dict[str, np.ndarray]
    fill: float
    samples: int
    skipped: int
    file: str = "synthetic corpus"

    def row_sets(self) -> list[tuple[MemoryRows, float]]:
        return [(MemoryRows(self.arrays, self.file), 1.0)]


def tokenise(
    sample: Sample, tokenizer: Tokenizer, *, train_on_prompt: bool, end_tokens: int = 0
) -> TokenisedSample:
    """Tokenises a corpus sample as one chat turn, with so many end tokens more after it; the prompt
    is a target only if asked for."""
    prompt = tokenizer.encode(CHAT_PROMPT.format(prompt=sample.prompt)).ids
    answer = tokenizer.encode(sample.answer + CHAT_END).ids
    answer += answer[-1:] * end_tokens
    trainable = np.ones(len(prompt) + len(answer), bool)
    trainable[: len(prompt)] = train_on_prompt
    return TokenisedSample(np.array(prompt + answer, np.int32), trainable)


def build_dataset(
    config: TrainConfig,
    tokenizer: Tokenizer,
    pad_token_id: int,
    report: Callable[[int], None],
    split: Split = "train",
) -> PackedDataset:
    """Generates, tokenises and packs the corpus that ``config`` describes.

    Samples longer than a row are counted in ``skipped``, and said by the caller.
    """
    data, skipped = config.data, 0

    def tokenised() -> Iterator[TokenisedSample]:
        nonlocal skipped
        weights = data.weights or None
        stream = generate(data.corpus_seed, data.samples, split=split, weights=weights)
        for number, sample in enumerate(stream, 1):
            row = tokenise(
                sample,
                tokenizer,
                train_on_prompt=data.train_on_prompt,
                end_tokens=data.end_tokens,
            )
            if len(row.tokens) > config.row_length:
                skipped += 1
            else:
                yield row
            if number % 1000 == 0:
                report(number)

    sizes = {"row_length": config.row_length, "block_size": config.block_size}
    rows = [
        row_arrays(members, pad_token_id=pad_token_id, **sizes)
        for members in pack(tokenised(), **sizes)
    ]
    if not rows:
        raise InputError(
            f"row_length: none of the {skipped} samples fits into a row of "
            f"{config.row_length} tokens"
            if skipped
            else "data.samples: the corpus is empty"
        )
    arrays = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    fill = float((arrays["segment_ids"] > 0).mean())
    return PackedDataset(arrays, fill, data.samples, skipped)


def rows_recipe(config: TrainConfig, tokenizer: Tokenizer) -> str:
    """Writes all that the rows depend on as a text to compare."""
    fields = dataclasses.asdict(config.data)
    # How rows are read, not what is in them; and where the tokenizer lies, whose content counts.
    for name in ("sources", "skip", "workers", "prefetch", "tokenizer"):
        del fields[name]
    return json.dumps([fields, config.row_length, config.block_size, tokenizer.to_str()])


def save_dataset(dataset: PackedDataset, path: Path) -> None:
    numbers = {k: np.array(getattr(dataset, k)) for k in ("fill", "samples", "skipped")}
    with written_beside(path) as file:
        np.savez(file, allow_pickle=False, **dataset.arrays, **numbers)


def load_dataset(path: Path) -> PackedDataset:
    with path.open("rb") as opened, np.load(opened) as file:
        arrays = {name: file[name] for name in file.files}
    numbers = {k: arrays.pop(k).item() for k in ("fill", "samples", "skipped")}
    return PackedDataset(arrays, **numbers, file=str(path))


class MemoryRows:
    """Gives packed rows in memory, by number.

    Args:
      arrays: ``[rows, row_length]`` each.
      file: where they came from.
    """

    def __init__(self, arrays: dict[str, np.ndarray], file: str):
        self._arrays, self._file = arrays, file

    def __len__(self) -> int:
        return len(self._arrays["tokens"])

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def place(self, index: int) -> tuple[str, int]:
        """Returns the file of the rows, and ``index``."""
        return self._file, index

    def __repr__(self) -> str:
        return f"MemoryRows({len(self)})"
