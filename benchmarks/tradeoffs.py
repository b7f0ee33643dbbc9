"""Measures the paper's trade-offs on the included model: accuracy against speed over τ, λ and W in
mode paper, and streaming against block-wise decoding. AR takes turns with the rest. Block-wise
decoding, the paper's baseline, opens new masks only once its whole window is committed. It runs in
the tests' plain Python decoder, so its tokens and forwards are counted, but not its time.

An interrupted run continues where it stopped: groups measured before are read from `--output`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from rich.console import Console

from benchmarks.options import add_numbers, new_parser
from infer.bench.measure import machine, table
from infer.bench.subject import regimes_of
from infer.evaluate import Decoder, ar_agrees, decoders_at, evaluate_all
from infer.plots import check_plot, new_figure, save_figure
from infer.score import Score
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.completion import Completion
from wedlm_jax.errors import InputError
from wedlm_jax.generation import complete
from wedlm_jax.host.atomic import check_writable, write_json
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.records.questions import Question, tally

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PENALTIES = (0.0, 0.01, 0.02, 0.05, 0.1)
WINDOWS = (4, 6, 8, 16, 32)
USUAL_PENALTY = 0.02
"""The λ at which block-wise decoding, and verified decoding, which has no λ, are measured, too."""
BLOCK_WISE = "block-wise"

Row = dict[str, Any]
"""A decoder's results in a regime: its `Score` with τ, λ and W, and its speed relative to AR; for
block-wise decoding only the counts."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("tradeoffs", __doc__, passes=2)
    add_numbers(parser, "--samples", 60, "questions of each regime")
    add_numbers(parser, "--windows", WINDOWS, "values of W")
    for flag, values, what in (
        ("--thresholds", THRESHOLDS, "values of τ, in nats"),
        ("--penalties", PENALTIES, "values of λ, in nats per slot"),
    ):
        shown = " ".join(f"{value:g}" for value in values)
        parser.add_argument(
            flag, type=float, nargs="+", default=values, metavar="X", help=f"{what} [{shown}]"
        )
    parser.add_argument("--regime", nargs="+", metavar="NAME", help="kinds of questions [all]")
    parser.add_argument("--plot", default=None, metavar="FILE", help="also draw the trade-offs")
    options = parser.parse_args(arguments)
    if options.output is None:
        raise InputError("--output: expected a file, to which the figures of each group are added")
    if options.plot is not None:
        check_plot(options.plot)
    rows = measured(options, Path(options.output))
    console = Console(highlight=False)
    for regime in dict.fromkeys(row["regime"] for row in rows):
        here = [row for row in rows if row["regime"] == regime]
        front = pareto(here)
        title = f"{regime.replace('_', ' ')}: no other beats these in quality and forwards"
        console.print(table(title, list(map(_cells, front))))
    if options.plot is not None:
        draw(rows, Path(options.plot))
    return 0


def measured(options: Any, path: Path) -> list[Row]:
    """Measures each group that is missing in ``path`` and adds it there; returns all rows.

    Raises:
      InputError: the file has figures for other settings, which cannot be compared.
    """
    check_writable(path, "--output")
    questions = regimes_of(vars(options))
    regimes = [some[: options.samples] for some in questions.values()]
    settings = {
        "machine": machine(),
        "regimes": list(questions),
        "thresholds": list(options.thresholds),
        "samples": options.samples,
        "passes": options.passes,
    }
    made: dict[str, Any] = {"settings": settings, "groups": {}}
    if path.exists():
        made = json.loads(path.read_text(encoding="utf-8"))
        if made.get("settings") != settings:
            raise InputError(f"{path}: has figures for other settings; choose another --output")
    todo = [
        (window, penalty)
        for window in options.windows
        for penalty in options.penalties
        if _name(window, penalty) not in made["groups"]
    ]
    console, started, decoders = Console(stderr=True, highlight=False), time.perf_counter(), []
    for number, (window, penalty) in enumerate(todo):
        spent = time.perf_counter() - started
        left = f", {spent / number * (len(todo) - number) / 60:.0f} min left" if number else ""
        console.print(f"{_name(window, penalty)}: group {number + 1} of {len(todo)}{left}")
        if number == 0 or window != todo[number - 1][0]:
            decoders = decoders_at(None, options.thresholds, window_size=window)
        group = list(_group(decoders, window, penalty, regimes, options.passes))
        if penalty == USUAL_PENALTY:
            group += block_wise(decoders, window, regimes)
        made["groups"][_name(window, penalty)] = group
        write_json(path, made)
    return [row for group in made["groups"].values() for row in group]


def _name(window: int, penalty: float) -> str:
    return f"W = {window}, λ = {penalty:g}"


def _group(
    decoders: Sequence[Decoder],
    window: int,
    penalty: float,
    regimes: Sequence[Sequence[Question]],
    passes: int,
) -> Iterator[Row]:
    """Yields the rows of one window and position penalty."""
    chosen = {
        one.name: dataclasses.replace(
            one, params=dataclasses.replace(one.params, position_penalty=penalty)
        )
        for one in decoders
        if penalty == USUAL_PENALTY or one.name.startswith(("AR", "paper"))
    }
    of_ar: dict[str, Score] = {}
    for score in evaluate_all(list(chosen.values()), regimes, passes=passes):
        params = chosen[score.decoder].params
        of_ar.setdefault(score.regime, score)  # AR comes first
        yield {
            **score.as_row(),
            "kind": score.decoder.partition(" τ")[0],
            "window": window,
            "penalty": penalty,
            "threshold": params.entropy_threshold,
            "speed": score.speed_up(of_ar[score.regime]),
        }


def block_wise(
    decoders: Sequence[Decoder], window: int, regimes: Sequence[Sequence[Question]]
) -> list[Row]:
    """Decodes block by block with the parameters of those ``decoders`` that stream."""
    from tests.reference.decode_loop import decode
    from tests.reference.full_forward import full_forward

    streaming = [one for one in decoders if one.params.mode == "paper"]
    llm, codec = streaming[0].llm, streaming[0].llm.codec
    assert codec is not None
    model = load_checkpoint(llm.folder, dtype=jnp.dtype(llm.dtype))
    forward, config, rows = full_forward(model), model.config, list[Row]()
    with ProgressBar("answers", total=sum(map(len, regimes)) * len(streaming)) as bar:
        for questions, one in itertools.product(regimes, streaming):
            params, answers = one.params, list[Completion]()
            for question in questions:
                made = decode(
                    forward,
                    question.encode(codec),
                    params,
                    window=window,
                    mask_token_id=config.require_mask_token_id(),
                    eos_token_ids=config.eos_token_ids,
                    refill="blockwise",
                )
                counts = made.num_forwards, made.num_token_instances
                result = Completion(None, made.token_ids, made.finish_reason, *counts)
                answers.append(complete(codec, result, params))
                bar.advance(title=f"{question.regime.replace('_', ' ')} · {BLOCK_WISE}")
            counted = tally(questions, answers)
            rows.append(
                {
                    "decoder": f"{BLOCK_WISE} τ={params.entropy_threshold:g}",
                    "regime": questions[0].regime,
                    "ar_agrees": ar_agrees(llm, questions, answers),
                    **counted.as_row(),
                    "kind": BLOCK_WISE,
                    "window": window,
                    "penalty": params.position_penalty,
                    "threshold": params.entropy_threshold,
                    "speed": None,
                }
            )
    return rows


# --- what is shown ---------------------------------------------------------------------------


def _cells(row: Row) -> dict[str, Any]:
    streams = row["kind"] not in ("AR", "verified")
    return {
        "decoder": row["decoder"],
        "W": "" if row["kind"] == "AR" else row["window"],
        "λ": row["penalty"] if streams else "",
        _measure(row): 100 * quality(row),
        "against AR": "" if row["speed"] is None else f"{row['speed']:.2f}×",
        "tokens / forward": row["tokens_per_forward"],
        "p_cache": row["p_cache"],
    }


def quality(row: Row) -> float:
    """Returns the share of right answers; in a regime that has none, as prose, the share of tokens
    that AR finds most probable."""
    share = row["ar_agrees"] if row["accuracy"] is None else row["accuracy"]
    return float(share)


def _measure(row: Row) -> str:
    return "AR agrees, %" if row["accuracy"] is None else "right, %"


def pareto(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of one regime that no other row beats both in quality and in tokens per
    forward, the best first. Tokens per forward are the same on every machine, and decide its speed
    where decoding is limited by reading weights."""
    front: list[Row] = []
    for row in sorted(rows, key=lambda row: (-quality(row), -row["tokens_per_forward"])):
        if not front or row["tokens_per_forward"] > front[-1]["tokens_per_forward"]:
            front.append(row)
    return front


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws quality against tokens per forward, a column for each regime: streaming and block-wise
    decoding over τ, and mode paper at every W and λ with the front."""
    regimes = list(dict.fromkeys(row["regime"] for row in rows))
    figure = new_figure(5 * len(regimes), 8)
    panels = figure.subplots(2, len(regimes), squeeze=False)
    widest = 16 if any(row["window"] == 16 for row in rows) else max(r["window"] for r in rows)
    for column, regime in enumerate(regimes):
        here = [row for row in rows if row["regime"] == regime]
        usual = [r for r in here if r["window"] == widest and r["penalty"] == USUAL_PENALTY]
        over, every = panels[0][column], panels[1][column]
        for kind in ("paper", BLOCK_WISE, "verified"):
            _curve(over, [row for row in usual if row["kind"] == kind], kind)
        over.set_title(f"{regime.replace('_', ' ')}, W = {widest}")
        for window in sorted({row["window"] for row in here}):
            some = [r for r in here if r["window"] == window and r["kind"] == "paper"]
            every.plot(*_points(some), "o", label=f"paper, W = {window}", alpha=0.6, markersize=4)
        every.plot(*_points(pareto(here)), "k*-", linewidth=1, markersize=10, label="front")
        every.set_xlabel("tokens per forward")
        for axes in (over, every):
            axes.set_ylabel(_measure(here[0]))
            axes.grid(alpha=0.3)
    panels[0][0].legend()
    panels[1][0].legend()
    save_figure(figure, path)


def _points(rows: Sequence[Row]) -> tuple[list[float], list[float]]:
    return [row["tokens_per_forward"] for row in rows], [100 * quality(row) for row in rows]


def _curve(axes: Any, rows: Sequence[Row], label: str) -> None:
    marker = "*" if label == "verified" else "o"
    axes.plot(*_points(rows), marker=marker, markersize=8, label=label)
    for row, x, y in zip(rows, *_points(rows), strict=True):
        if row["threshold"] is not None and label != "verified":
            axes.annotate(
                f"{row['threshold']:g}", (x, y), (4, 5), textcoords="offset points", fontsize=8
            )


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.tradeoffs", lambda: main(sys.argv[1:])))
