"""`python -m train.embedded.corpus FILE`: samples of the corpus as questions, a line of JSON each.

Those held out are seen by no training run, whatever its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from train.embedded.corpus import generate
from train.embedded.corpus.questions import as_question
from wedlm_jax.errors import InputError, file_error
from wedlm_jax.host.command_line import run_command


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m train.embedded.corpus", description=__doc__)
    add = parser.add_argument
    add("output", metavar="FILE", help="JSONL file to write")
    add("--samples", type=int, default=2000, metavar="N", help="[2000]")
    add("--seed", type=int, default=77, metavar="N", help="other samples [77]")
    add("--split", choices=("train", "heldout"), default="heldout", help="[heldout]")
    options = parser.parse_args(arguments)
    if options.samples < 1:
        raise InputError("--samples: expected at least 1")
    samples = generate(options.seed, options.samples, split=options.split)
    lines = [json.dumps(as_question(sample), ensure_ascii=False) + "\n" for sample in samples]
    try:
        Path(options.output).write_text("".join(lines), encoding="utf-8")
    except OSError as error:
        raise file_error(options.output, "cannot be written", error) from None
    return 0


if __name__ == "__main__":
    sys.exit(run_command("python -m train.embedded.corpus", lambda: main(sys.argv[1:])))
