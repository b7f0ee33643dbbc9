"""What a job depends on, as one short text: equal texts mean equal results."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

WHOLE_FILE = 16 * 2**20
SAMPLES, SAMPLE_SIZE = 256, 64 * 2**10
MODEL_FILES = (".json", ".safetensors", ".txt", ".jinja")


def fingerprint(input_digest: str, model: Path, settings: dict[str, Any]) -> str:
    """A digest of the input, the checkpoint's contents and everything that changes a result.

    Args:
      input_digest: of the input's bytes.
      model: the checkpoint folder; it may be moved or copied between runs.
      settings: JSON values.
    """
    parts = {"input": input_digest, "model": folder_digest(model), "settings": settings}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def folder_digest(folder: Path) -> str:
    """A digest of a checkpoint's files: names, sizes and contents.

    Of a large file 256 evenly spread pieces are read: weights that were trained further
    differ everywhere, and reading all of them would take as long as loading them.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in MODEL_FILES and path.is_file():
            size = path.stat().st_size
            digest.update(f"{path.name}\n{size}\n".encode())
            with path.open("rb") as file:
                if size <= WHOLE_FILE:
                    digest.update(file.read())
                    continue
                for i in range(SAMPLES):
                    file.seek((size - SAMPLE_SIZE) * i // (SAMPLES - 1), os.SEEK_SET)
                    digest.update(file.read(SAMPLE_SIZE))
    return digest.hexdigest()
