"""`wedlm rows`: packed rows as text, for a person who looks for a document."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from train.data.samples import load_tokenizer
from train.data.shards import decode_samples
from wedlm_jax.checkpoint.open import packaged
from wedlm_jax.errors import InputError, shortened
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.packing import TokenisedSample


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm rows",
        description="Shows packed rows as text, sample by sample: those that skipped.jsonl names,\n"
        "for one.",
        epilog="example:\n"
        "  wedlm rows data/corpus/rows-00000-of-00008.arrayrecord 17 204 --tokenizer Qwen3-8B",
    )
    parser.add_argument("file", type=Path, help="a shard of `wedlm tokenize`")
    parser.add_argument("rows", nargs="+", type=int, metavar="ROW", help="its number, from 0")
    parser.add_argument(
        "--tokenizer", required=True, type=Path, metavar="DIR", help="folder of tokenizer.json"
    )
    options = parser.parse_args(arguments)
    tokenizer = load_tokenizer(Path(packaged(options.tokenizer)))
    for row, samples in zip(options.rows, read_rows(options.file, options.rows), strict=True):
        for number, sample in enumerate(samples, 1):
            print(
                f"== row {row}, sample {number} of {len(samples)}: {len(sample.tokens)} tokens, "
                f"{int(sample.trainable.sum())} trained on"
            )
            print(tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False))
    return 0


def read_rows(file: Path, rows: list[int]) -> list[list[TokenisedSample]]:
    """Reads the samples of each of these rows.

    Args:
      file: a shard.
      rows: their numbers in it, from 0.

    Raises:
      InputError: the file is not there or is none, or it has no row of such a number.
    """
    if not file.is_file():
        raise InputError(f"{file}: no such file")
    try:
        read, count = _opened(file)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        raise InputError(f"{file}: no file of packed rows ({shortened(str(error))})") from None
    if wrong := [row for row in rows if not 0 <= row < count]:
        raise InputError(f"{file}: no row {wrong[0]}; it has rows 0 to {count - 1}")
    try:
        return [read(row) for row in rows]
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(f"{file}: a row cannot be read ({shortened(str(error))})") from None


def _opened(file: Path) -> tuple[Any, int]:
    """Returns a function that reads the samples of a row, and how many rows there are."""
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(str(file))
    if not reader.ok():
        raise ValueError("it has no ending")
    return lambda row: decode_samples(reader.read([row])[0]), int(reader.num_records())
