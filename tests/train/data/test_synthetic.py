"""Packed rows from the corpus."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from train.data.synthetic import (
    PackedDataset,
    build_dataset,
    load_dataset,
    save_dataset,
    tokenise,
)
from train.data.tokenizer import train_tokenizer
from train.embedded.corpus import generate
from train.recipe.config import DataSection, TrainConfig
from wedlm_jax.errors import InputError

CONFIG = TrainConfig(
    rows=3,
    accumulation=2,
    row_length=128,
    block_size=32,
    seed=4,
    data=DataSection(corpus_seed=3, samples=60),
)
PAD = 0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    samples = generate(3, 300, split="train")
    return train_tokenizer((f"{s.prompt}\n{s.answer}\n" for s in samples), 600)


@pytest.fixture(scope="module")
def dataset(tokenizer: Tokenizer) -> PackedDataset:
    return build_dataset(CONFIG, tokenizer, PAD, report=lambda _: None)


def test_a_sample_is_one_chat_turn_whose_answer_alone_is_a_target(tokenizer: Tokenizer) -> None:
    sample = next(generate(0, 1, split="train"))
    row = tokenise(sample, tokenizer, train_on_prompt=False)
    text = tokenizer.decode(row.tokens.tolist(), skip_special_tokens=False)
    assert text == (
        f"<|im_start|>user\n{sample.prompt}<|im_end|>\n"
        f"<|im_start|>assistant\n{sample.answer}<|im_end|>"
    )
    targets = tokenizer.decode(row.tokens[row.trainable].tolist(), skip_special_tokens=False)
    assert targets == f"{sample.answer}<|im_end|>"
    assert row.tokens.dtype == np.int32
    whole = tokenise(sample, tokenizer, train_on_prompt=True)
    np.testing.assert_array_equal(whole.tokens, row.tokens)
    assert whole.trainable.all()


def test_every_sample_that_fits_stands_in_exactly_one_row(
    tokenizer: Tokenizer, dataset: PackedDataset
) -> None:
    samples = generate(3, 60, split="train")
    rows = [tokenise(sample, tokenizer, train_on_prompt=False) for sample in samples]
    expected = Counter(tuple(row.tokens) for row in rows if len(row.tokens) <= CONFIG.row_length)
    assert dataset.skipped == 60 - expected.total() > 0
    assert dataset.samples == 60
    found: Counter[tuple[int, ...]] = Counter()
    for tokens, segments, positions in zip(
        *(dataset.arrays[name] for name in ("tokens", "segment_ids", "positions")), strict=True
    ):
        for segment in range(1, segments.max() + 1):
            here = np.flatnonzero(segments == segment)
            assert here[0] % CONFIG.block_size == 0
            np.testing.assert_array_equal(here, here[0] + np.arange(len(here)))
            np.testing.assert_array_equal(positions[here], np.arange(len(here)))
            found[tuple(tokens[here])] += 1
        assert (tokens[segments == 0] == PAD).all()
    assert found == expected


def test_arrays_have_the_shape_of_rows_and_fill_counts_tokens(dataset: PackedDataset) -> None:
    assert set(dataset.arrays) == {"tokens", "positions", "segment_ids", "trainable"}
    shapes = {array.shape for array in dataset.arrays.values()}
    assert len(shapes) == 1
    assert shapes.pop()[1] == CONFIG.row_length
    assert dataset.fill == pytest.approx((dataset.arrays["segment_ids"] != 0).mean())
    assert 0.3 < dataset.fill < 1


def test_a_dataset_is_the_same_when_built_again_and_when_read_back(
    tokenizer: Tokenizer, dataset: PackedDataset, tmp_path: Path
) -> None:
    save_dataset(dataset, tmp_path / "rows.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npz"]
    again = build_dataset(CONFIG, tokenizer, PAD, report=lambda _: None)
    for other in (again, load_dataset(tmp_path / "rows.npz")):
        assert (other.fill, other.samples, other.skipped) == (
            dataset.fill,
            dataset.samples,
            dataset.skipped,
        )
        assert set(other.arrays) == set(dataset.arrays)
        for name, array in dataset.arrays.items():
            assert other.arrays[name].dtype == array.dtype
            np.testing.assert_array_equal(other.arrays[name], array)


def test_an_empty_corpus_is_refused(tokenizer: Tokenizer) -> None:
    config = TrainConfig(data=DataSection(samples=0))
    with pytest.raises(InputError, match="corpus is empty"):
        build_dataset(config, tokenizer, PAD, report=lambda _: None)


def test_rows_too_short_for_any_sample_are_refused(tokenizer: Tokenizer) -> None:
    config = TrainConfig(row_length=32, data=DataSection(samples=20))
    with pytest.raises(InputError, match="none of the 20 samples fits into a row of 32 tokens"):
        build_dataset(config, tokenizer, PAD, report=lambda _: None)
