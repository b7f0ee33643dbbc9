"""`wedlm evaluate`: accuracy and speed on held-out prompts of the corpus.

Decoders are compared from the same weights in the same process. Every decoder completes
every prompt once untimed, which compiles what it needs; then they take turns, prompt set
by prompt set, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import wedlm_jax
from infer.heldout import read_questions
from infer.plots import check_plot, draw_scores
from infer.score import Score
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from infer.heldout import Question
    from wedlm_jax.completion import Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

EMBEDDED_QUESTIONS = Path(wedlm_jax.__file__).parent / "embedded" / "heldout.jsonl"

MAX_TOKENS = 160
"""Longer than any answer of the corpus."""

PAPER_THRESHOLDS = (0.2, 0.4, 0.6, 0.9)


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A way to decode: its name, the model that does it, and its sampling parameters."""

    name: str
    llm: LLM
    params: SamplingParams


def evaluate(
    decoders: Sequence[Decoder],
    questions: Sequence[Question],
    *,
    passes: int = 3,
    on_pass: Callable[[str], None] = lambda _: None,
) -> list[Score]:
    """Scores decoders on the same questions of one regime.

    Args:
      passes: timed passes of each decoder over all the questions.
      on_pass: told the name of the decoder whose pass begins.
    """
    answers, seconds = [], [[0.0] * passes for _ in decoders]
    for decoder in decoders:
        on_pass(decoder.name)
        answers.append(_complete(decoder, questions))
    for number in range(passes):
        for decoder, times in zip(decoders, seconds, strict=True):
            on_pass(decoder.name)
            compiled, started = decoder.llm.engine.compile_seconds, time.perf_counter()
            _complete(decoder, questions)
            compiling = decoder.llm.engine.compile_seconds - compiled
            times[number] = time.perf_counter() - started - compiling
    return [
        _score(decoder, questions, completions, answers[0], statistics.median(times))
        for decoder, completions, times in zip(decoders, answers, seconds, strict=True)
    ]


def chat_prompt(llm: LLM, question: Question) -> list[int]:
    """The question as the model was trained to read it: a user's turn."""
    return llm.chat_prompt([{"role": "user", "content": question.prompt}])


def _complete(decoder: Decoder, questions: Iterable[Question]) -> list[Completion]:
    prompts = [chat_prompt(decoder.llm, question) for question in questions]
    return decoder.llm.generate(prompts, decoder.params)


def _score(
    decoder: Decoder,
    questions: Sequence[Question],
    completions: Sequence[Completion],
    first: Sequence[Completion],
    seconds: float,
) -> Score:
    """The score of completions, ``first`` being those of the first decoder."""
    pairs = zip(questions, completions, strict=True)
    verdicts = [question.is_right(completion.text or "") for question, completion in pairs]
    known = [verdict for verdict in verdicts if verdict is not None]
    alike = sum(a.token_ids == b.token_ids for a, b in zip(completions, first, strict=True))
    prompts = [chat_prompt(decoder.llm, question) for question in questions]
    scored = decoder.llm.score(prompts, [c.token_ids for c in completions], top=1)
    best = sum(
        place.top[0][0] == token
        for c, places in zip(completions, scored, strict=True)
        for token, place in zip(c.token_ids, places, strict=True)
    )
    tokens = sum(len(c.token_ids) for c in completions)
    return Score(
        decoder.name,
        questions[0].regime,
        len(questions),
        sum(known) / len(known) if known else None,
        alike / len(questions),
        best / tokens,
        tokens,
        sum(c.num_forwards for c in completions),
        sum(c.num_token_instances for c in completions),
        seconds,
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="wedlm evaluate",
        description="Accuracy and speed of AR, block-wise, streaming and verified decoding from\n"
        "the same weights, on questions held out from the embedded model's training, or your own.",
        epilog="example:\n  wedlm evaluate --samples 100 --entropy-threshold 0.4 "
        "--output scores.json --plot scores.svg",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add("--questions", metavar="FILE", help="JSONL questions [those of the embedded model]")
    add("--samples", type=int, default=300, metavar="N", help="questions a regime [300]")
    add("--window-size", type=int, default=16, metavar="N", help="W, masked slots [16]")
    add(
        "--entropy-threshold",
        type=float,
        nargs="+",
        default=list(PAPER_THRESHOLDS),
        metavar="X",
        help="τ in nats, one or more [0.2 0.4 0.6 0.9]",
    )
    add("--position-penalty", type=float, default=0.02, metavar="X", help="λ [0.02]")
    add("--batch-size", type=int, default=1, metavar="N", help="prompts at a time [1]")
    add("--quantization", choices=("int8",), help="round the weights to 8 bits [not]")
    add("--kv-cache-dtype", choices=("int8",), help="round keys and values to 8 bits [not]")
    add("--passes", type=int, default=3, metavar="N", help="timed passes [3]")
    add("--output", metavar="FILE", help="also write the scores as JSON")
    add("--plot", metavar="FILE", help="also draw them (.svg, .png or .pdf; needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.samples < 1 or options.passes < 1:
        raise InputError("--samples and --passes: expected at least 1")
    regimes = read_questions(Path(options.questions or EMBEDDED_QUESTIONS))
    if options.output is not None and not Path(options.output).resolve().parent.is_dir():
        raise InputError(f"--output {options.output}: no such folder to write it in")
    if options.plot is not None:
        check_plot(options.plot)

    from infer.score import score_table

    scores = _evaluate_all(options, list(regimes.values()))
    from rich.console import Console

    Console().print(score_table(scores))
    if options.output is not None:
        text = json.dumps([score.as_row() for score in scores], indent=1)
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    if options.plot is not None:
        draw_scores(scores, Path(options.plot))
    return 0


def decoders_at(
    model: str | None,
    thresholds: Sequence[float],
    *,
    window_size: int = 16,
    position_penalty: float = 0.02,
    batch_size: int = 1,
    blockwise: bool = True,
    **rounding: str | None,
) -> list[Decoder]:
    """AR decoding, block-wise and streaming decoding at each threshold, and verified decoding.

    Args:
      rounding: of weights and cache, as `LLM` takes it.
    """
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

    load = partial(LLM, model, max_batch_size=batch_size, **rounding)  # type: ignore[arg-type]
    base = SamplingParams(mode="paper", max_tokens=MAX_TOKENS, position_penalty=position_penalty)
    at = [dataclasses.replace(base, entropy_threshold=x) for x in thresholds]
    decoders = [Decoder("AR", load(window_size=0), dataclasses.replace(base, mode="ar"))]
    for refill in ("blockwise", "streaming") if blockwise else ("streaming",):
        llm = load(window_size=window_size, refill=refill)
        name = "WeDLM" if refill == "streaming" else "block-wise"
        decoders += [Decoder(f"{name} τ={p.entropy_threshold:g}", llm, p) for p in at]
    verified = dataclasses.replace(base, mode="verified")
    return [*decoders, Decoder("verified", decoders[-1].llm, verified)]


def _evaluate_all(options: argparse.Namespace, regimes: list[list[Question]]) -> list[Score]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    decoders = decoders_at(
        options.model,
        options.entropy_threshold,
        window_size=options.window_size,
        position_penalty=options.position_penalty,
        batch_size=options.batch_size,
        quantization=options.quantization,
        kv_cache_dtype=options.kv_cache_dtype,
    )
    scores: list[Score] = []
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=len(regimes) * len(decoders) * (options.passes + 1))
        for questions in regimes:

            def begin(name: str, regime: str = questions[0].regime) -> None:
                bar.update(task, advance=1, description=f"{regime} · {name}")

            chosen = questions[: options.samples]
            scores += evaluate(decoders, chosen, passes=options.passes, on_pass=begin)
    return scores
