"""Makes the folder of the embedded model from a finished run.

    python -m train.embedded runs/embedded_suffixes/hf wedlm_jax/embedded

Weights are rounded to bfloat16; beside them go the tokenizer and the held-out questions of
`infer.heldout`, none of which any training run sees, whatever its seed. The model card stays.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import jax.numpy as jnp

from train.corpus import REGIMES, generate
from train.corpus.questions import as_question
from wedlm_jax.checkpoint.hf import load_checkpoint, save_checkpoint
from wedlm_jax.errors import InputError

# Prose has no right answers: its questions measure speed, for which fewer do.
QUESTIONS = {"low_entropy": 400, "reasoning": 400, "prose": 60}
QUESTIONS_SEED = 2026
# So many are drawn for each that is kept.
DRAWS = 4


def export_embedded(trained: Path, destination: Path) -> None:
    """Writes weights, config, tokenizer and questions into ``destination``."""
    model = load_checkpoint(trained, dtype=jnp.float32)
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as beside:
        folder = Path(beside) / "model"
        save_checkpoint(model, model.config, folder, dtype="bfloat16", tokenizer_from=trained)
        questions = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _questions())
        (folder / "heldout.jsonl").write_text(questions, encoding="utf-8")
        for file in sorted(folder.iterdir()):
            file.replace(destination / file.name)
    size = sum(file.stat().st_size for file in destination.iterdir())
    print(f"{destination}: {size / 1e6:.1f} MB")


def _questions() -> Iterator[dict[str, str | None]]:
    """Held-out questions, none twice: the smaller kinds have only a few dozen."""
    for regime in REGIMES:
        stream = generate(
            QUESTIONS_SEED, DRAWS * QUESTIONS[regime], split="heldout", weights={regime: 1.0}
        )
        distinct = {sample.prompt: sample for sample in stream}
        yield from map(as_question, islice(distinct.values(), QUESTIONS[regime]))


if __name__ == "__main__":
    try:
        export_embedded(*map(Path, sys.argv[1:3]))
    except (InputError, TypeError) as error:
        sys.exit(f"train.embedded: {error}")
