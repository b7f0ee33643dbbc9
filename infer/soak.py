"""`python -m infer.soak`: decodes prompts of random lengths for a long time and watches memory.

After the warm-up nothing may be compiled, and memory that is in use must stay flat: both are
told once a minute, and judged at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared

GROWTH_ALLOWED = 0.05
"""Of the memory in use, from the end of the first quarter to the end."""


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infer.soak", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add("--minutes", type=float, default=60, metavar="X", help="how long [60]")
    add("--rows", type=int, default=16, metavar="N", help="prompts that decode together [16]")
    add("--mode", choices=("paper", "verified", "ar"), default="verified", help="[verified]")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths [0]")
    add("--output", metavar="FILE", help="also write a JSON line a minute")
    options = parser.parse_args(arguments)
    if options.minutes <= 0:
        raise InputError("--minutes: expected a number above 0")

    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

    llm = LLM(options.model, max_batch_size=options.rows)
    params = SamplingParams(mode=options.mode, max_tokens=160)
    print("warming up ...", flush=True)
    llm.warm_up(params)
    programs, started = llm.engine.num_programs, time.monotonic()
    longest = llm.engine.max_model_len - params.max_tokens
    rows = _rows(options, llm.engine.config.vocab_size, longest, params, started)
    samples: list[dict[str, Any]] = []
    done = tokens = 0
    for some in llm.run(rows):
        done += len(some)
        tokens += sum(len(completion.token_ids) for _, completion in some)
        elapsed = time.monotonic() - started
        if elapsed >= 60 * len(samples):
            now = {
                "minutes": round(elapsed / 60, 2),
                "rows": done,
                "tokens": tokens,
                "resident_mib": round(resident_bytes() / 2**20, 1),
                "programs": llm.engine.num_programs,
            }
            samples.append(now)
            print(json.dumps(now), flush=True)
            if options.output is not None:
                with Path(options.output).open("a", encoding="utf-8") as file:
                    file.write(json.dumps(now) + "\n")
    if not samples:
        raise InputError(f"--minutes {options.minutes}: over before the first prompt began")
    return _judge(samples, programs, llm.engine.num_programs)


def _rows(
    options: argparse.Namespace, vocab: int, longest: int, params: Any, started: float
) -> Iterator[Prepared]:
    """Random tokens of random lengths, short ones most often, until the time is over."""
    import dataclasses

    import numpy as np

    rng = np.random.default_rng(options.seed)
    number = 0
    while time.monotonic() - started < 60 * options.minutes:
        length = round(float(np.exp(rng.uniform(0, np.log(longest)))))
        limit = round(float(np.exp(rng.uniform(0, np.log(params.max_tokens)))))
        prompt = rng.integers(0, vocab, length).tolist()
        yield prompt, dataclasses.replace(params, max_tokens=limit, seed=number)
        number += 1


def resident_bytes() -> int:
    """Memory that this process has in use; Linux only."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])

    return pages * os.sysconf("SC_PAGE_SIZE")


def _judge(samples: list[dict[str, Any]], before: int, after: int) -> int:
    if after > before:
        print(f"{after - before} programs were compiled on the way", file=sys.stderr)
        return 1
    quarter = samples[len(samples) // 4]["resident_mib"]
    growth = samples[-1]["resident_mib"] / quarter - 1
    print(f"nothing compiled on the way; memory changed by {growth:+.1%} since the first quarter")
    return 1 if growth > GROWTH_ALLOWED else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except InputError as error:
        raise SystemExit(f"python -m infer.soak: {error}") from None
