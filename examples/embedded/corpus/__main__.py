"""`python -m examples.embedded.corpus FILE`: writes samples of the corpus, one line of JSON each.

No training run sees the held-out samples, whatever its seed.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from examples.embedded.corpus import REGIMES, Sample, generate
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import naming
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process

FORMS = {"questions": Sample.as_question, "conversations": Sample.as_conversation}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m examples.embedded.corpus", description=__doc__)
    add = parser.add_argument
    add("output", metavar="FILE", help="JSONL file to write")
    add(
        "--form",
        choices=FORMS,
        default="questions",
        help="questions to ask a model, or conversations for `wedlm tokenize` [questions]",
    )
    add("--samples", type=int, default=2000, metavar="N", help="number of samples [2000]")
    add("--seed", type=int, default=77, metavar="N", help="seed for the samples [77]")
    add("--split", choices=("train", "heldout"), default="heldout", help="the split [heldout]")
    add(
        "--weights",
        type=float,
        nargs=len(REGIMES),
        metavar="SHARE",
        help=f"shares of {', '.join(REGIMES)} in the samples [0.3 0.45 0.25]",
    )
    options = parser.parse_args(arguments)
    if options.samples < 1:
        raise InputError("--samples: expected at least 1")
    weights = dict(zip(REGIMES, options.weights, strict=True)) if options.weights else None
    try:
        samples = generate(options.seed, options.samples, split=options.split, weights=weights)
    except ValueError as error:
        raise InputError(f"--weights: {error}") from None
    record = FORMS[options.form]
    lines = [json.dumps(record(sample), ensure_ascii=False) + "\n" for sample in samples]
    with naming(options.output):
        Path(options.output).write_text("".join(lines), encoding="utf-8")
    return 0


if __name__ == "__main__":
    exit_process(run_command("python -m examples.embedded.corpus", lambda: main(sys.argv[1:])))
