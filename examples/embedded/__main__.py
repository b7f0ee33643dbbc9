"""`python -m examples.embedded TRAINED FOLDER`: makes the model's folder from a finished run.

Weights are rounded to bfloat16. The tokenizer and held-out questions go with them; no training run
sees any of these questions, whatever its seed. The model card is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from examples.embedded.corpus import REGIMES, Sample, generate
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process

# Prose has no right answers: its questions only measure speed, and fewer are enough.
QUESTIONS = {"low_entropy": 400, "reasoning": 400, "prose": 60}
QUESTIONS_SEED = 2026
# Number drawn for each one that is kept.
DRAWS = 4


def export_embedded(trained: Path, destination: Path) -> None:
    """Writes weights, config, tokenizer and questions into ``destination``."""
    model = load_checkpoint(trained, dtype=jnp.float32)
    destination.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=destination.parent) as temporary:
        folder = Path(temporary) / "model"
        save_checkpoint(model, model.config, folder, dtype="bfloat16", tokenizer_from=trained)
        questions = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in _questions())
        (folder / "heldout.jsonl").write_text(questions, encoding="utf-8")
        for file in sorted(folder.iterdir()):
            file.replace(destination / file.name)
    size = sum(file.stat().st_size for file in destination.iterdir())
    print(f"{destination}: {size / 1e6:.1f} MB")


def _questions() -> Iterator[dict[str, Any]]:
    """Yields held-out questions, none twice: the smaller kinds have only a few dozen."""
    for regime in REGIMES:
        stream = generate(
            QUESTIONS_SEED, DRAWS * QUESTIONS[regime], split="heldout", weights={regime: 1.0}
        )
        distinct = {sample.prompt: sample for sample in stream}
        yield from map(Sample.as_question, islice(distinct.values(), QUESTIONS[regime]))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.embedded", description=__doc__)
    add = parser.add_argument
    add("trained", type=Path, metavar="TRAINED", help="the run's export, runs/NAME/hf")
    add("folder", type=Path, metavar="FOLDER", help="where the model goes: wedlm_jax/embedded")
    options = parser.parse_args(arguments)
    export_embedded(options.trained, options.folder)
    return 0


if __name__ == "__main__":
    exit_process(run_command("python -m examples.embedded", lambda: main(sys.argv[1:])))
