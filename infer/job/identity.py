"""Identifies a job by what its results depend on: input, model and settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax import __version__
from wedlm_jax.errors import file_error

if TYPE_CHECKING:
    from infer.job.workload import Workload
    from wedlm_jax.llm import LLM

WHOLE_FILE = 16 * 2**20
SAMPLES, SAMPLE_SIZE = 256, 64 * 2**10
MODEL_FILES = (".json", ".safetensors", ".txt", ".jinja")


@dataclasses.dataclass(frozen=True)
class Identity:
    """Holds what distinguishes a job from all others. Its JSON form is stored with the job.

    Attributes:
      input: digest of the records.
      checkpoint: digest of the model's files; the folder may be moved or copied.
      settings: everything else that results depend on, as JSON values. What only changes how sums
        are rounded, such as batch sizes and attention kernels, is left out.
      shard_size: records of a shard.
      rows: records of the input.
    """

    input: str
    checkpoint: str
    settings: dict[str, Any]
    shard_size: int
    rows: int

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Identity:
        """Makes an identity from what `as_json` returned; other keys are ignored."""
        return cls(**{field.name: value[field.name] for field in dataclasses.fields(cls)})

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))  # tuples become lists

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.as_json(), sort_keys=True).encode()).hexdigest()

    def differences(self, other: dict[str, Any]) -> str:
        """Describes how another job, as JSON, differs: "max_tokens is 24 there and 23 here"."""
        mine, theirs = _flat(self.as_json()), _flat(other)
        names = [name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)]
        words = []
        for name in names:
            if name in ("input", "checkpoint"):
                words.append(f"the {name} differs")
            elif name != "rows":
                words.append(f"{name} is {theirs.get(name)!r} there and {mine.get(name)!r} here")
        return ", ".join(words)


def identity_of(llm: LLM, workload: Workload) -> Identity:
    """Returns the identity of a job over these records with this model."""
    settings = {
        "version": __version__,
        "params": dataclasses.asdict(workload.params),
        "chat": workload.chat,
        "window_size": llm.engine.window_size,
        "refill": llm.engine.settings.refill,
        "max_model_len": llm.engine.max_model_len,
        "dtype": llm.dtype,
        "deterministic": llm.engine.settings.deterministic,
    }
    rare = {
        "quantization": llm.options.quantization,
        "kv_cache_dtype": llm.engine.kv_cache_dtype,
        "chat_template_kwargs": dict(llm.codec.variables) if llm.codec else {},
        "trust_special_tokens": llm.codec is not None and llm.codec.trust_special_tokens,
    }
    settings |= {name: value for name, value in rare.items() if value}
    index = workload.index
    return Identity(
        index.digest, folder_digest(llm.folder), settings, index.shard_size, index.records
    )


def _flat(value: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, item in value.items():
        result |= _flat(item) if isinstance(item, dict) else {key: item}
    return result


def folder_digest(folder: Path) -> str:
    """Returns a digest of a checkpoint's files: names, sizes and contents.

    Of a large file 256 evenly spread parts are read: weights that were trained further differ
    everywhere, and reading all of them would take as long as loading them.

    Raises:
      InputError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in sorted(folder.iterdir()):
            if path.suffix not in MODEL_FILES or not path.is_file():
                continue
            size = path.stat().st_size
            digest.update(os.fsencode(path.name) + f"\n{size}\n".encode())
            with path.open("rb") as file:
                if size <= WHOLE_FILE:
                    digest.update(file.read())
                    continue
                for i in range(SAMPLES):
                    file.seek((size - SAMPLE_SIZE) * i // (SAMPLES - 1), os.SEEK_SET)
                    digest.update(file.read(SAMPLE_SIZE))
    except OSError as error:
        raise file_error(folder, "cannot be read", error) from None
    return digest.hexdigest()
