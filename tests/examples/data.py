"""Small inputs and packed rows for the tests of training data."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import hashlib
import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from examples.embedded.corpus import generate
from examples.embedded.corpus.records import as_conversation
from train.data.job import TokeniseOptions, tokenise
from train.data.manifest import Manifest
from train.data.samples import SampleOptions

EMBEDDED = Path(__file__).parents[2] / "wedlm_jax" / "embedded"
ROW, BLOCK = 128, 32

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Count to 3."},
    {"role": "assistant", "content": "1, 2, 3"},
    {"role": "user", "content": "And back?"},
    {"role": "assistant", "content": "3, 2, 1"},
]


class Silent:
    """Watches a job and says nothing."""

    def progress(self, bytes_read: int, bytes_total: int, tokens: int) -> None:
        pass


class NumberedRows:
    """Row i holds the number ``first + i`` everywhere."""

    def __init__(self, rows: int, first: int = 0, length: int = 4):
        self.rows, self.first, self.length = rows, first, length

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = np.full(self.length, self.first + int(index), np.int32)
        return {
            "tokens": number,
            "positions": number,
            "segment_ids": number * 2,
            "trainable": number % 2 == 0,
        }

    def place(self, index: int) -> tuple[str, int]:
        return f"from {self.first}", index

    def __repr__(self) -> str:
        return f"NumberedRows({self.rows})"


def options(inputs: Sequence[Path], output: Path, **changes: object) -> TokeniseOptions:
    """Rows of 128 in blocks of 32 with the embedded tokenizer; ``changes`` of either class."""
    names = {field.name for field in dataclasses.fields(SampleOptions)}
    samples = {key: value for key, value in changes.items() if key in names}
    rest = {key: value for key, value in changes.items() if key not in names}
    return TokeniseOptions(
        inputs=tuple(map(str, inputs)),
        output=str(output),
        samples=SampleOptions(**{"tokenizer": str(EMBEDDED), "row_length": ROW, **samples}),  # type: ignore[arg-type]
        **{"block_size": BLOCK, **rest},  # type: ignore[arg-type]
    )


def tokenised(inputs: Sequence[Path], output: Path, **changes: object) -> Manifest:
    return tokenise(options(inputs, output, **changes), Silent())


def write_jsonl(path: Path, records: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def documents(count: int, seed: int = 0, mean_words: float = 60.0) -> list[dict[str, str]]:
    """Texts whose lengths vary as those of web pages do: a few are very long."""
    random = np.random.default_rng(seed)
    words = ["count", "from", "the", "red", "box", "to", "nine", "and", "list", "each", "name"]
    lengths = 1 + random.lognormal(np.log(mean_words), 0.8, count).astype(int)
    return [{"text": " ".join(random.choice(words, length))} for length in lengths]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def corpus_rows(tokenizer: Path, row_length: int = ROW, block_size: int = BLOCK) -> Path:
    """A folder of rows with forty word problems, made once for each tokenizer and size."""
    digest = hashlib.sha256((tokenizer / "tokenizer.json").read_bytes()).hexdigest()[:16]
    folder = _corpus_folder() / f"{digest}-{row_length}-{block_size}"
    if not folder.exists():
        samples = generate(0, 40, split="train", weights={"reasoning": 1.0})
        records = write_jsonl(folder.with_suffix(".jsonl"), list(map(as_conversation, samples)))
        sizes = {"tokenizer": str(tokenizer), "row_length": row_length, "block_size": block_size}
        tokenised([records], folder, **sizes)
    return folder


@functools.cache
def _corpus_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="wedlm-rows-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)
