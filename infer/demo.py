"""`wedlm demo`: the embedded model decodes, seen slot by slot, then measured."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console

    from infer.evaluate import Decoder
    from infer.heldout import Question
    from infer.score import Score
    from wedlm_jax.engine.engine import Engine
    from wedlm_jax.engine.events import WindowView
    from wedlm_jax.params import SamplingParams

PROMPTS_A_REGIME = 4


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="wedlm demo",
        description="Decodes held-out prompts of three regimes with the embedded model, shows the\n"
        "window of masks as it fills, and measures WeDLM against AR decoding with the\n"
        "same weights and the same engine.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--delay",
        type=float,
        default=0.12,
        metavar="SECONDS",
        help="pause after each forward, so that it can be seen; terminal only [0.12]",
    )
    parser.add_argument(
        "--samples",
        type=int,
        default=40,
        metavar="N",
        help="questions a regime that are measured at the end [40]",
    )
    options = parser.parse_args(arguments)
    if options.samples < PROMPTS_A_REGIME or not 0 <= options.delay <= 10:
        raise InputError(
            f"--samples: expected at least {PROMPTS_A_REGIME}; --delay: from 0 to 10 seconds"
        )

    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print("Loading the embedded model ...")
    from infer.evaluate import EMBEDDED_QUESTIONS, decoders_at
    from infer.heldout import read_questions

    decoders = decoders_at(None, [0.4], kinds=("ar", "paper", "verified"))
    regimes = [
        questions[: options.samples] for questions in read_questions(EMBEDDED_QUESTIONS).values()
    ]
    wedlm = decoders[1]
    _introduce(console, wedlm)
    for questions in regimes:
        console.rule(f"[bold]{questions[0].regime.replace('_', ' ')}")
        for number, question in enumerate(questions[:PROMPTS_A_REGIME]):
            _show(console, wedlm, question, options.delay, trace=number == 0)
    _measure(console, decoders, regimes)
    return 0


def _introduce(console: Console, decoder: Decoder) -> None:
    import jax

    from infer.evaluate import MAX_TOKENS
    from infer.window_view import LEGEND

    engine = decoder.llm.engine
    config, device = engine.config, jax.devices()[0]
    console.print(
        f"{engine.num_parameters / 1e6:.1f}M parameters, {config.num_hidden_layers} layers, "
        f"vocabulary {config.vocab_size}; W = {engine.window_size}, "
        f"τ = {decoder.params.entropy_threshold}, λ = {decoder.params.position_penalty}; "
        f"on {device.platform}. Compiling ..."
    )
    # So that what is watched is decoding alone.
    decoder.llm.generate([[0]], dataclasses.replace(decoder.params, max_tokens=1))
    console.print(f"compiled in {engine.compile_seconds:.1f} s, at most {MAX_TOKENS} tokens each")
    if console.is_terminal:
        console.print(LEGEND)


def _show(
    console: Console, decoder: Decoder, question: Question, delay: float, *, trace: bool
) -> None:
    """One prompt: live in a terminal; else the answer, after its forwards if ``trace``."""
    from infer.window_view import plain, styled

    codec = decoder.llm.codec
    assert codec is not None
    console.print(f"\n> {question.prompt}", style="bold", markup=False)
    views = _views(decoder.llm.engine, question.encode(decoder.llm), decoder.params)
    view = View([], None, 0)
    if console.is_terminal:
        from rich.live import Live

        with Live(console=console, auto_refresh=False) as live:
            for view in views:
                live.update(styled(codec, view.token_ids, view.window), refresh=True)
                time.sleep(delay if view.window else 0)
    else:
        for view in views:
            if view.window and view.num_forwards and trace:
                console.print(f"  {plain(codec, view.token_ids, view.window)}", markup=False)
    tokens, forwards = len(view.token_ids), view.num_forwards
    text = codec.complete_text(view.token_ids)
    if not console.is_terminal:
        console.print(text, markup=False)
    verdicts = {True: ", right", False: f", wrong: expected {question.expected!r}", None: ""}
    verdict = verdicts[question.is_right(text)]
    console.print(
        f"  {tokens} tokens in {forwards} forwards ({tokens / forwards:.1f} a forward){verdict}",
        style="dim",
        markup=False,
    )


class View(NamedTuple):
    """A prompt between two forwards.

    Attributes:
      token_ids: committed.
      window: as the next forward will see it; None behind the last.
      num_forwards: decode forwards so far.
    """

    token_ids: list[int]
    window: WindowView | None
    num_forwards: int


def _views(engine: Engine, prompt: Sequence[int], params: SamplingParams) -> Iterator[View]:
    """Decodes a prompt forward by forward; yields before the first and after each."""
    from wedlm_jax.engine.burst import Request
    from wedlm_jax.engine.events import Failed, Finished, TokenDelta

    committed: list[int] = []
    num_forwards = 0
    events = engine.step([Request(0, prompt, params)], max_forwards=0)
    while True:
        for event in events:
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                yield View(event.result.token_ids, None, event.result.num_forwards)
                return
            if isinstance(event, TokenDelta):
                committed, num_forwards = committed + event.token_ids, event.num_forwards
        yield View(committed, engine.window(0), num_forwards)
        events = engine.step(max_forwards=1)


def _measure(console: Console, decoders: list[Decoder], regimes: list[list[Question]]) -> None:
    from infer.evaluate import evaluate
    from infer.score import score_table

    scores: list[Score] = []
    console.rule("[bold]measured")
    for questions in regimes:
        with console.status(f"{questions[0].regime}: by turns ..."):
            scores += evaluate(decoders, questions)
    console.print(score_table(scores))
    engines = {id(decoder.llm): decoder.llm.engine for decoder in decoders}
    compiling = sum(engine.compile_seconds for engine in engines.values())
    console.print(
        f"{len(regimes[0])} held-out questions a regime, one at a time; the same weights and "
        f"engine, AR being W = 0.\nVerified commits exactly what AR would. Wall-clock with "
        f"prefill, without compilation ({compiling:.0f} s in all).\nAccuracy: low entropy by the "
        "whole text, reasoning by the final answer."
    )
