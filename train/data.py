"""Packed training rows: corpus samples, tokenised, packed once, then read through grain.

The rows live in one `.npz` beside the run. Grain shuffles them anew each epoch from
the seed and addresses batches by step number, so a resumed run sees the same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from tokenizers import Tokenizer

from train.config import TrainConfig
from train.corpus import Sample, Split, generate
from wedlm_jax.errors import InputError
from wedlm_jax.packing import TokenisedSample, pack, row_arrays

CHAT_PROMPT = "<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
CHAT_END = "<|im_end|>"


@dataclasses.dataclass(frozen=True)
class PackedDataset:
    """Rows in memory: each array ``[rows, row_length]``; ``fill`` is the share of real tokens."""

    arrays: dict[str, np.ndarray]
    fill: float
    samples: int
    skipped: int


def tokenise(sample: Sample, tokenizer: Tokenizer, *, train_on_prompt: bool) -> TokenisedSample:
    """A corpus sample as one chat turn; the prompt is a target only if asked for."""
    prompt = tokenizer.encode(CHAT_PROMPT.format(prompt=sample.prompt)).ids
    answer = tokenizer.encode(sample.answer + CHAT_END).ids
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
            row = tokenise(sample, tokenizer, train_on_prompt=data.train_on_prompt)
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


def save_dataset(dataset: PackedDataset, path: Path) -> None:
    beside = path.with_suffix(".part.npz")
    numbers = {k: np.array(getattr(dataset, k)) for k in ("fill", "samples", "skipped")}
    np.savez(beside, allow_pickle=False, **dataset.arrays, **numbers)
    beside.replace(path)


def load_dataset(path: Path) -> PackedDataset:
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    numbers = {k: arrays.pop(k).item() for k in ("fill", "samples", "skipped")}
    return PackedDataset(arrays, **numbers)


class _Rows(grain.sources.RandomAccessDataSource):
    """The packed rows as grain sees them."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self._arrays = arrays

    def __len__(self) -> int:
        return len(self._arrays["tokens"])

    def __getitem__(self, index: Any) -> dict[str, np.ndarray]:
        return {name: array[index] for name, array in self._arrays.items()}

    def __repr__(self) -> str:
        return f"_Rows({len(self)})"


def batches(dataset: PackedDataset, config: TrainConfig) -> grain.MapDataset:
    """Batch number s is step s's global batch: arrays ``[accumulation, rows, row_length]``."""
    shape = (config.accumulation, config.rows)
    size = config.accumulation * config.rows
    if len(dataset.arrays["tokens"]) < size:
        raise InputError(
            f"data: {len(dataset.arrays['tokens'])} packed rows are fewer than one batch of {size}"
        )

    def fold(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name: x.reshape(*shape, *x.shape[1:]) for name, x in batch.items()}

    source = grain.MapDataset.source(_Rows(dataset.arrays)).seed(config.seed).shuffle().repeat()
    return source.batch(size, drop_remainder=True).map(fold)
