"""`dataset.json`: what a folder of packed rows holds, and how it was made."""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from wedlm_jax.errors import InputError
from wedlm_jax.host.storage import why_absent

MANIFEST = "dataset.json"
VERSION = 1

DECISIVE = ("added_tokens", "normalizer", "pre_tokenizer", "model")
"""The parts of a tokenizer.json that turn a text into ids."""


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Describes one file of rows."""

    file: str
    rows: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The content of a `dataset.json`.

    Attributes:
      row_length, block_size: L and B of the packed rows.
      tokenizer: its `tokenizer_fingerprint`.
      records: records that were read, the malformed included.
      samples: samples in the rows; a long document is several.
      rows: packed rows.
      tokens, trainable_tokens: in the rows, without padding.
      fill: tokens / (rows * row_length).
      malformed: records left out; reasons: how many for each, and where the first ones stand.
      made_with: the settings that decided the rows.
      trainable_blocks: blocks with a trainable token, in the rows together; None in folders of
        earlier versions.
      most_trainable_blocks: in one row.
      added_tokens: how often each id occurs that the tokenizer has as an added token, or not at
        all; None in folders of earlier versions. A mask token should not be among them.
      unread_keys: how many records have a key that is not read, by its name; None in folders of
        earlier versions.
      turns, changed_turns, first_changed: turns of assistants; how many of them the chat template
        did not write as they were, and the first: ``place``, ``written`` and ``became``.
      typed: records that spell special tokens in their messages, which are text.
      turn_end: the token that ends them; None where there are no conversations, and in folders of
        earlier versions.
      content: SHA-256 of all rows in order.
      shards: the files in order.
    """

    row_length: int
    block_size: int
    tokenizer: str
    records: int
    samples: int
    rows: int
    tokens: int
    trainable_tokens: int
    fill: float
    malformed: int
    reasons: dict[str, dict[str, Any]]
    made_with: dict[str, Any]
    content: str
    shards: list[DataShard]
    version: int = VERSION
    added_tokens: dict[str, int] | None = None
    trainable_blocks: int | None = None
    most_trainable_blocks: int | None = None
    unread_keys: dict[str, int] | None = None
    turns: int = 0
    changed_turns: int = 0
    first_changed: dict[str, str] | None = None
    turn_end: int | None = None
    typed: int = 0


def write_manifest(manifest: Manifest, folder: Path) -> None:
    text = json.dumps(dataclasses.asdict(manifest), indent=2, ensure_ascii=False)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest of a folder, and checks that its shards are there and of their sizes.

    Raises:
      InputError: naming the folder or the file that is missing, cut off or of another version.
    """
    path = folder / MANIFEST
    if folder.is_file():
        raise InputError(
            f"{folder}: is a file; run `wedlm tokenize --input {folder}` on it first, and name the "
            "folder that it makes"
        )
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        version = fields["version"]
        if version != VERSION:
            raise InputError(f"{path}: version {version!r}, where {VERSION} is read here")
        manifest = Manifest(**{**fields, "shards": [DataShard(**one) for one in fields["shards"]]})
    except FileNotFoundError:
        raise InputError(f"{why_absent(folder, MANIFEST)}; `wedlm tokenize` makes one") from None
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a manifest of packed rows ({error})") from None
    for shard in manifest.shards:
        file = folder / shard.file
        size = file.stat().st_size if file.is_file() else None
        if size != shard.bytes:
            found = "missing" if size is None else f"of {size:,} bytes"
            raise InputError(f"{file}: {found}, where {path} says {shard.bytes:,} bytes")
    return manifest


def mask_token_in(manifest: Manifest, folder: str, token_id: int) -> str | None:
    """Returns a line to tell if clean text has the mask token, or nobody counted; else None."""
    if manifest.added_tokens is None:
        return f"{folder}: tokenised by an earlier version; whether it has mask tokens is not known"
    count = manifest.added_tokens.get(str(token_id), 0)
    if not count:
        return None
    return (
        f"{folder}: the text has the mask token {token_id} {count:,} times, and the model would "
        "read each as a mask; leave those records out, or name another token as model.mask_token"
    )


def tokenizer_fingerprint(tokenizer: Tokenizer) -> str:
    """Distinguishes tokenizers by all that decides the ids of a text.

    Two files that differ in layout, or in what is done with ids afterwards, have the same one.
    """
    content = json.loads(tokenizer.to_str())
    decisive = {name: content.get(name) for name in DECISIVE}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


class AddedTokens:
    """Counts the tokens that ordinary text is not made of: those added to a tokenizer, and ids that
    it does not have."""

    def __init__(self, tokenizer: Tokenizer):
        ordinary = set(tokenizer.get_vocab(with_added_tokens=True).values())
        ordinary -= set(tokenizer.get_added_tokens_decoder())
        self._ordinary = np.zeros(max(ordinary, default=0) + 2, bool)  # the last: ids beyond
        self._ordinary[list(ordinary)] = True
        self._counts: collections.Counter[int] = collections.Counter()

    def count(self, tokens: np.ndarray) -> None:
        """Takes in the tokens ``[L]`` of a sample."""
        ordinary = self._ordinary[np.minimum(tokens, len(self._ordinary) - 1)]
        self._counts.update(tokens[~ordinary].tolist())

    def by_id(self) -> dict[str, int]:
        """Returns the counts, the smallest id first."""
        return {str(token): count for token, count in sorted(self._counts.items())}


def added_up(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Returns the sums of counts by id, the smallest id first."""
    total: collections.Counter[str] = collections.Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items(), key=lambda item: int(item[0])))
