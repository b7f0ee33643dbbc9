"""`wedlm tokenize`: turns text, conversations or token ids into packed rows.

Tested by tests/train/data/test_job.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from wedlm_jax.checkpoint.open import packaged
from wedlm_jax.errors import InputError, counted
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import ProgressBar

if TYPE_CHECKING:
    from train.data.shards import Manifest

EPILOG = """\
input, by file name extension; folders are searched, several may be given:
  .jsonl, .jsonl.gz,  one JSON object per line, with one of
  .jsonl.zst          (zstd: pip install 'wedlm-jax[data]')
                        "text": a document
                        "messages": [{"role": ..., "content": ...}, ...], a conversation
                        "conversations": [{"from": "human", "value": ...}, ...], also one
                        "prompt" and "completion": texts
                        "instruction", optionally "input", and "output": texts, as in Alpaca
                        "token_ids": [...], optionally "trainable": [true, ...] as long
                        "prompt_token_ids" and "token_ids", as `wedlm generate` writes them with
                        --prompt-token-ids (--format completions): the prompt is not trained on
                      and optionally, with a conversation or a pair of texts,
                        "system": its system message
                        "tools": [{...}, ...] and "chat_template_kwargs": {...}, for the template
  .txt                one document
  .parquet            columns with these names (pip install 'wedlm-jax[data]')
  .arrayrecord        one JSON object, as above, per record
  a folder            written by datasets.Dataset.save_to_disk and named itself; columns with
                      these names (pip install 'wedlm-jax[datasets]')

A document is trained on as a whole, followed by an end-of-text token; one that is longer than a
row is cut into rows. A conversation is rendered with the tokenizer's chat template, and its
assistant's turns, including their end token, are trained on; one that is longer than a row is
left out. Special tokens written in messages are text, as they are when the model is used. A
prompt with its completion becomes a user's and an assistant's turn or, if the tokenizer has no
chat template, one text, of which the completion and an end-of-text token are trained on.
token_ids without trainable are a document, with it a finished sample.

To resume a job that was killed, run the same command again: the input is cut into parts of about
1 GiB of whole files, and finished parts are not made again. --num-hosts distributes the parts
over hosts that see the same files.

Nothing is dropped silently: DIR/malformed.jsonl names each record that was left out, and why;
DIR/dataset.json has the counts, also of keys that are not read. The output is the same for any
number of workers and hosts.

examples:
  wedlm tokenize --input corpus/ --output data/corpus --tokenizer Qwen3-8B \\
      --row-length 4096 --block-size 32 --workers 16
  wedlm tokenize --input chats.jsonl --output data/chats --tokenizer Qwen3-8B \\
      --row-length 4096 --block-size 32 --end-tokens 8
  wedlm train --config configs/wedlm_8b.yaml model.init_from=Qwen3-8B \\
      'data.sources={data/corpus: 0.8, data/chats: 0.2}' evaluation.source=data/held-out
"""


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="wedlm tokenize",
        description="Tokenises and packs training data once, for `wedlm train` to read.",
        epilog=EPILOG,
    )
    add = made.add_argument
    add("--input", nargs="+", required=True, metavar="PATH", help="files and folders to read")
    add("--output", required=True, metavar="DIR", help="folder to create")
    add("--tokenizer", required=True, metavar="DIR", help="folder of the model's tokenizer.json")
    add("--row-length", type=int, required=True, metavar="N", help="tokens per packed row")
    add(
        "--block-size",
        type=int,
        default=32,
        metavar="B",
        help="block_size of the recipe; samples begin at multiples of it [%(default)s]",
    )
    add(
        "--format",
        choices=("auto", "text", "chat", "pairs", "tokens", "completions"),
        default="auto",
        help="format of the records; auto: by the key that a record has [%(default)s]",
    )
    add(
        "--train-on-prompt",
        action="store_true",
        help="train on all of a conversation or pair, not only on the assistant's turns or the "
        "completion",
    )
    add(
        "--end-tokens",
        type=int,
        default=0,
        metavar="K",
        help="additional end tokens after each assistant's turn, trained on: they teach what "
        "to fill after an end [%(default)s]",
    )
    add(
        "--document-end",
        metavar="TOKEN",
        help="token after each document [<|endoftext|>, or else the eos_token]",
    )
    add(
        "--trust-special-tokens",
        action="store_true",
        help="read special tokens written in messages as tokens, which can end a turn and begin "
        "another [as text]",
    )
    add(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="worker processes that read and tokenise; 0: only this process [%(default)s]",
    )
    add(
        "--rows-per-shard",
        type=int,
        default=32_768,
        metavar="N",
        help="rows per output file [%(default)s]",
    )
    add(
        "--num-hosts",
        metavar="N",
        help="number of hosts that share the work, each started with the same command; auto: ask "
        "the launcher",
    )
    add(
        "--host-id",
        type=int,
        metavar="I",
        help="index of this host, from 0 [as the launcher says]",
    )
    add("--fail-fast", action="store_true", help="stop at the first malformed record")
    return made


def main(arguments: list[str]) -> int:
    options = parser().parse_args(arguments)

    from rich.console import Console

    from train.data.chunks import find_input
    from train.data.job import MALFORMED, TokeniseOptions, tokenise
    from train.data.samples import SampleOptions
    from wedlm_jax.host.processes import find_host

    given = vars(options) | {"tokenizer": packaged(options.tokenizer)}
    decisive = {field.name: given[field.name] for field in dataclasses.fields(SampleOptions)}
    job = TokeniseOptions(
        inputs=tuple(options.input),
        output=options.output,
        block_size=options.block_size,
        samples=SampleOptions(**decisive),
        workers=options.workers,
        fail_fast=options.fail_fast,
        shard_rows=options.rows_per_shard,
        host=find_host(options.num_hosts, options.host_id),
    )
    found = find_input(job.inputs)
    print(f"{counted(len(found.files), 'file')} to read", flush=True)
    if others := found.others:
        named = ", ".join(map(str, others[:3])) + (", ..." if len(others) > 3 else "")
        print(f"{len(others)} files of other kinds are not read: {named}", flush=True)
    started = time.monotonic()
    bar = ProgressBar("bytes", percent=True, title="tokenising", console=Console(), every=10.0)

    def show(bytes_read: int, bytes_total: int, tokens: int) -> None:
        rate = tokens / max(time.monotonic() - started, 1e-9)
        text = f"{tokens:,} tokens, {rate:,.0f} tokens/s"
        bar.update(bytes_read, total=bytes_total, text=text)

    with bar:
        made = tokenise(job, show)
    if made is None:
        print(f"{job.host}: its parts are done; host 0 makes {job.output} when all are done")
        return 0
    seconds = max(time.monotonic() - started, 1e-9)
    print(
        f"{job.output}: {counted(made.rows, 'row')} of {made.row_length} in "
        f"{counted(len(made.shards), 'shard')}, {made.fill:.1%} filled; "
        f"{counted(made.samples, 'sample')} of {counted(made.records, 'record')}, "
        f"{made.tokens:,} tokens ({made.trainable_tokens:,} trainable), "
        f"{made.tokens / seconds:,.0f} tokens/s"
    )
    if made.unread_keys:
        most = sorted(made.unread_keys.items(), key=lambda one: -one[1])
        named = ", ".join(f"{key} ({counted(n, 'record')})" for key, n in most)
        print(f"keys that are not read: {named}")
    if first := made.first_changed:
        print(
            f"the chat template changed {made.changed_turns:,} of "
            f"{counted(made.turns, 'turn')} of assistants; the first, {first['place']}: "
            f"{first['written']!r} became {first['became']!r}"
        )
    if made.typed:
        spell = "spells" if made.typed == 1 else "spell"
        print(
            f"{counted(made.typed, 'record')} {spell} special tokens in messages, read as text; "
            "--trust-special-tokens reads them as tokens"
        )
    for line in filter(None, (_blocks(made), _mask_tokens(options.tokenizer, made))):
        print(line)
    if made.malformed:
        print(f"{counted(made.malformed, 'record')} left out, listed in {job.output}/{MALFORMED}:")
        for reason, examples in made.reasons.items():
            count = examples["records"]
            named = ", ".join(examples["first"][:3]) + (" ..." if count > 3 else "")
            print(f"  {count:,} {reason}: {named}")
    return 0


def _blocks(made: Manifest) -> str | None:
    """Returns a message about how many of a row's blocks a run computes twice, if not all."""
    count = made.row_length // made.block_size
    most, total = made.most_trainable_blocks, made.trainable_blocks
    if most == count:
        return None
    return (
        f"at most {most} of a row's {count} blocks have tokens to train on "
        f"({total / made.rows:.1f} on average), so objective wedlm computes {most} per row twice"
    )


def _mask_tokens(folder: str, made: Manifest) -> str | None:
    """Returns a message if the text has mask tokens, else None. Only checks if the tokenizer's
    folder is a model's, since the model determines the mask token."""
    from tokenizers import Tokenizer

    from train.data.shards import mask_token_in
    from train.mask_token import choose_mask_token, named_mask_token
    from wedlm_jax.config import config_from_hf, read_config_json

    path = Path(folder)
    if not (path / "config.json").exists():
        return None
    try:
        config = config_from_hf(read_config_json(path))
        tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
        token = choose_mask_token(tokenizer, config, own=named_mask_token(path))
    except InputError:
        return None  # not a model to train: another may use its tokenizer
    return mask_token_in(made, "input", token)
