"""`wedlm tokenize`: text, conversations or token ids into packed rows."""

from __future__ import annotations

import argparse
import time
from typing import Any

EPILOG = """\
input, by ending; folders are searched, several may be given:
  .jsonl, .jsonl.gz   a JSON object a line, with one of
                        "text": a document
                        "messages": [{"role": ..., "content": ...}, ...], a conversation
                        "token_ids": [...], and perhaps "trainable": [true, ...] of its length
  .txt                one document
  .parquet            columns of these names (pip install 'wedlm-jax[data]')
  .arrayrecord        a JSON object, as above, a record

A document is trained on whole, with an end-of-text token behind it; what is longer than a
row is cut into rows. Of a conversation, put through the tokenizer's chat template, the
assistant's turns are trained on, their end token included; one that is longer than a row is
left out. token_ids without trainable are a document, with it a finished sample.

Nothing is dropped in silence: DIR/malformed.jsonl names each record that was left out, and
why; DIR/dataset.json has the counts. The output is the same for any number of workers.

examples:
  wedlm tokenize --input corpus/ --output data/corpus --tokenizer Qwen3-8B \\
      --row-length 4096 --block-size 32 --workers 16
  wedlm tokenize --input chats.jsonl --output data/chats --tokenizer Qwen3-8B \\
      --row-length 4096 --block-size 32 --end-tokens 8
  wedlm train --config configs/wedlm_8b.yaml model.init_from=Qwen3-8B \\
      'data.sources={data/corpus: 0.8, data/chats: 0.2}'
"""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="wedlm tokenize",
        description="Tokenises and packs training data once, for `wedlm train` to read.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders to read")
    add("--output", required=True, metavar="DIR", help="folder to make")
    add("--tokenizer", required=True, metavar="DIR", help="folder of the model's tokenizer.json")
    add("--row-length", type=int, required=True, metavar="N", help="tokens in a packed row")
    add(
        "--block-size",
        type=int,
        default=32,
        metavar="B",
        help="samples begin at multiples of it, as in the recipe [%(default)s]",
    )
    add(
        "--format",
        choices=("auto", "text", "chat", "tokens"),
        default="auto",
        help="what a record is; auto: what its key says [%(default)s]",
    )
    add(
        "--train-on-prompt",
        action="store_true",
        help="train on all of a conversation, not on the assistant's turns alone",
    )
    add(
        "--end-tokens",
        type=int,
        default=0,
        metavar="K",
        help="further end tokens behind each assistant's turn, trained on: teaches what "
        "to fill behind an end [%(default)s]",
    )
    add(
        "--document-end",
        metavar="TOKEN",
        help="token behind each document [<|endoftext|>, or else the eos_token]",
    )
    add(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="processes that read and tokenise; 0: none but this one [%(default)s]",
    )
    add(
        "--rows-per-shard",
        type=int,
        default=32_768,
        metavar="N",
        help="rows in a file of the output [%(default)s]",
    )
    add("--fail-fast", action="store_true", help="stop at the first malformed record")
    return made


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)

    from train.data.job import MALFORMED, TokeniseOptions, check_options, tokenise
    from train.data.records import find_files
    from train.data.samples import SampleOptions

    job = TokeniseOptions(
        inputs=tuple(options.input),
        output=options.output,
        block_size=options.block_size,
        samples=SampleOptions(
            tokenizer=options.tokenizer,
            row_length=options.row_length,
            format=options.format,
            train_on_prompt=options.train_on_prompt,
            end_tokens=options.end_tokens,
            document_end=options.document_end,
        ),
        workers=options.workers,
        fail_fast=options.fail_fast,
        shard_rows=options.rows_per_shard,
    )
    check_options(job)
    files, other = find_files(job.inputs)
    print(f"{len(files)} files to read", flush=True)
    if other:
        named = ", ".join(str(path) for path in other[:3]) + (", ..." if len(other) > 3 else "")
        print(f"{len(other)} files of other kinds are not read: {named}", flush=True)
    started = time.monotonic()
    with ProgressDisplay() as display:
        made = tokenise(job, display)
    seconds = max(time.monotonic() - started, 1e-9)
    print(
        f"{job.output}: {made.rows:,} rows of {made.row_length} in {len(made.shards)} shards, "
        f"{made.fill:.1%} filled; {made.samples:,} samples of {made.records:,} records, "
        f"{made.tokens:,} tokens ({made.trainable_tokens:,} trainable), "
        f"{made.tokens / seconds:,.0f} tokens/s"
    )
    if made.malformed:
        print(f"{made.malformed:,} records left out, all named in {job.output}/{MALFORMED}:")
        for reason, found in made.reasons.items():
            first = ", ".join(found["first"][:3])
            print(f"  {found['records']:,} {reason}: {first}{' ...' * (found['records'] > 3)}")
    return 0


class ProgressDisplay:
    """A bar with tokens/s and ETA on a terminal, a plain line now and then elsewhere."""

    def __init__(self, seconds_between: float = 10.0):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn
        from rich.progress import TimeRemainingColumn as Remaining

        console = Console()
        self._plain = not console.is_terminal
        self._bar = Progress(
            TextColumn("[bold]tokenising"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[line]}"),
            Remaining(),
            console=console,
            disable=self._plain,
        )
        self._task = self._bar.add_task("", total=None, line="")
        self._between, self._started = seconds_between, time.monotonic()
        self._said = self._started

    def __enter__(self) -> ProgressDisplay:
        self._bar.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.stop()

    def progress(self, bytes_read: int, bytes_total: int, tokens: int) -> None:
        now = time.monotonic()
        elapsed = max(now - self._started, 1e-9)
        line = f"{tokens:,} tokens, {tokens / elapsed:,.0f} tokens/s"
        self._bar.update(self._task, completed=bytes_read, total=bytes_total, line=line)
        if self._plain and now - self._said >= self._between:
            self._said = now
            share = bytes_read / max(bytes_total, 1)
            left = elapsed * (1 - share) / max(share, 1e-9)
            print(f"{share:.1%} read, {line}, ETA {left / 60:.1f} min", flush=True)
