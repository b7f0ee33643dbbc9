"""`python -m infer.identity`: how many verified completions differ from the autoregressive ones.

Where a completion differs, how close AR's two best tokens were at the first place that does says
why: only ties within rounding may go another way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.evaluate import EMBEDDED_QUESTIONS
from infer.heldout import read_questions
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.completion import Completion


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m infer.identity", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add(
        "--questions",
        metavar="FILE",
        help="JSONL questions, as `python -m train.corpus FILE` writes them "
        "[those of the embedded model]",
    )
    add("--prompts", type=int, metavar="N", help="of all regimes by turns [all]")
    add(
        "--windows",
        type=int,
        nargs="+",
        default=[1, 2, 4, 8, 16, 32],
        metavar="W",
        help="one or more [1 2 4 8 16 32]",
    )
    add("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy [0]")
    add("--max-tokens", type=int, default=160, metavar="N", help="of a completion [160]")
    add("--rows", type=int, default=64, metavar="N", help="prompts that decode together [64]")
    add("--dtype", default="float32", help="float32 or bfloat16 [float32]")
    add("--deterministic", action="store_true", help="every forward in one shape [not]")
    add("--quantization", choices=("int8",), help="round the weights to 8 bits [not]")
    add("--kv-cache-dtype", choices=("int8",), help="round keys and values to 8 bits [not]")
    add("--output", metavar="FILE", help="also write a JSON line a window")
    options = parser.parse_args(arguments)
    if (options.prompts is not None and options.prompts < 1) or min(options.windows) < 1:
        raise InputError("--prompts and --windows: expected at least 1")

    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

    regimes = read_questions(Path(options.questions or EMBEDDED_QUESTIONS))
    turns = itertools.chain.from_iterable(itertools.zip_longest(*regimes.values()))
    questions = list(itertools.islice(filter(None, turns), options.prompts))
    chats = [[{"role": "user", "content": question.prompt}] for question in questions]

    def decode(window: int, mode: str) -> tuple[list[Completion], float]:
        llm = LLM(
            options.model,
            window_size=window,
            max_batch_size=options.rows,
            dtype=options.dtype,
            quantization=options.quantization,
            kv_cache_dtype=options.kv_cache_dtype,
            deterministic=options.deterministic,
        )
        params = SamplingParams(
            mode=mode, temperature=options.temperature, max_tokens=options.max_tokens, logprobs=2
        )
        started = time.monotonic()
        return llm.chat(chats, params), time.monotonic() - started

    expected, seconds = decode(0, "ar")
    tokens = sum(len(completion.token_ids) for completion in expected)
    margins = [margin(place.top) for one in expected for place in one.logprobs or ()]
    print(
        f"{options.dtype}: {len(expected)} prompts, {tokens} tokens by AR in {seconds:.0f} s; "
        f"between AR's two best tokens {statistics.median(margins):.2f} nats, the median",
        flush=True,
    )
    for window in options.windows:
        found, seconds = decode(window, "verified")
        line = {"window": window, "dtype": options.dtype, **compare(expected, found)}
        print(json.dumps(line), f"in {seconds:.0f} s", flush=True)
        if options.output is not None:
            with Path(options.output).open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    return 0


def margin(top: Sequence[tuple[int, float]]) -> float:
    """Nats between the two most probable tokens of a place."""
    return top[0][1] - top[1][1]


def compare(expected: Sequence[Completion], found: Sequence[Completion]) -> dict[str, Any]:
    """How many completions differ, and AR's margins where they first do."""
    margins = []
    for one, other in zip(expected, found, strict=True):
        if one.token_ids == other.token_ids:
            continue
        pairs = zip(one.token_ids, other.token_ids, strict=False)
        place = next(i for i, (a, b) in enumerate(pairs) if a != b)
        assert one.logprobs is not None
        margins.append(margin(one.logprobs[place].top))
    tokens = sum(len(completion.token_ids) for completion in found)
    return {
        "prompts": len(found),
        "differ": len(margins),
        "median_margin": statistics.median(margins) if margins else None,
        "largest_margin": max(margins, default=None),
        "tokens_per_forward": tokens / sum(completion.num_forwards for completion in found),
    }


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InputError as error:
        sys.exit(f"python -m infer.identity: {error}")
