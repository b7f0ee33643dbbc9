"""Scores of decoders on the prompts of a regime, as a table and as a figure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rich import box
from rich.table import Table

from infer.plots import new_figure, save_figure
from wedlm_jax.records.questions import Tally


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Tally):
    """The results of one decoder on the prompts of one regime.

    Attributes:
      as_first: share of completions with exactly the tokens of the first decoder.
      ar_agrees: share of tokens that the autoregressive head finds most likely, given all tokens
        before them.
      seconds: wall-clock time of each timed pass, prefill included, compiling excluded.
    """

    decoder: str
    regime: str
    as_first: float
    ar_agrees: float
    seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(statistics.median(self.seconds), 1e-9)

    def speed_up(self, other: Score) -> float:
        """Returns the speed-up over another decoder: the median over the passes."""
        return statistics.median(ratios_by_turns(self, other))

    def as_row(self) -> dict[str, object]:
        return super().as_row() | {"tokens_per_second": self.tokens_per_second}


class Timed(Protocol):
    """Something timed in turns with others: its tokens, and the seconds of each pass."""

    @property
    def tokens(self) -> int: ...

    @property
    def seconds(self) -> list[float]: ...


def ratios_by_turns(one: Timed, other: Timed) -> list[float]:
    """Returns the speed-up of one over the other in each pass. They take turns within a pass, so
    other work on the machine slows both."""
    more = one.tokens / max(other.tokens, 1)
    turns = zip(one.seconds, other.seconds, strict=True)
    return [more * theirs / max(mine, 1e-9) for mine, theirs in turns]


def columns(first: str) -> dict[str, str]:
    """Returns the columns of a score table after regime and decoder, and what each means; ``first``
    is the decoder that the others are compared with."""
    same = "as AR" if first == "AR" else "as first"
    return {
        "right": "answers that are right; - where nothing is judged, as in prose",
        same: f"completions that equal those of {first}, token for token",
        "AR\nagrees": "tokens that AR finds most probable, given all tokens before them",
        "tokens/\nforward": "completion tokens per decode forward: 1 in AR",
        "p_cache": "completion tokens per token computed: 1 in AR; at most 0.5 where masks are "
        "filled, since each position is computed first as a mask and then as a token",
        "tokens/\nsecond": "including the prompt, excluding compiling",
        "speed": f"tokens/second relative to {first}, the median over the passes",
    }


def legend(scores: Sequence[Score]) -> Table:
    """Returns lines that explain the columns of `score_table`."""
    lines = Table.grid(padding=(0, 2))
    for name, meaning in columns(scores[0].decoder).items():
        lines.add_row(name.replace("/\n", "/").replace("\n", " "), meaning)
    return lines


def score_table(scores: Sequence[Score]) -> Table:
    """Returns a table with a row for each regime and decoder; speeds are relative to the regime's
    first decoder."""
    # Narrow enough for a terminal of 80 columns.
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, show_edge=False, padding=0)
    table.add_column("regime", no_wrap=True)
    table.add_column("decoder", no_wrap=True)
    for name in columns(scores[0].decoder):
        table.add_column(name, justify="right", no_wrap=True)
    reference = scores[0]
    for score in scores:
        first = score.regime != reference.regime or score is scores[0]
        if first:
            reference = score
            if score is not scores[0]:
                table.add_section()
        table.add_row(
            score.regime.replace("_", " ") if first else "",
            score.decoder,
            "-" if score.accuracy is None else _percent(score.accuracy),
            _percent(score.as_first),
            f"{math.floor(100 * score.ar_agrees)}%",  # rounded down, so 100% means all
            f"{score.tokens_per_forward:.2f}",
            f"{score.p_cache:.2f}",
            f"{score.tokens_per_second:,.0f}",
            f"{score.speed_up(reference):.2f}x",
        )
    return table


def _percent(share: float) -> str:
    return f"{share:.0%}" if share in (0, 1) else f"{share:.1%}"


def draw_scores(scores: Sequence[Score], path: Path) -> None:
    """Draws the share of right answers against tokens per forward and against speed, one column per
    regime. A regime without right answers has the share of texts equal to AR's instead."""
    regimes = list(dict.fromkeys(score.regime for score in scores))
    figure = new_figure(4 * len(regimes), 7)
    panels = figure.subplots(2, len(regimes), squeeze=False)
    for column, regime in enumerate(regimes):
        shown = [score for score in scores if score.regime == regime]
        checked = shown[0].accuracy is not None
        for row, name in enumerate(("tokens per forward", "speed-up against AR, wall-clock")):
            axes = panels[row][column]
            for kind in dict.fromkeys(_kind(score) for score in shown):
                members = [score for score in shown if _kind(score) == kind]
                points = [
                    (
                        s.speed_up(shown[0]) if row else s.tokens_per_forward,
                        100 * (s.accuracy if s.accuracy is not None else s.as_first),
                    )
                    for s in members
                ]
                marker = "*" if kind == "verified" else "s" if kind == "AR" else "o"
                size = 14 if kind == "verified" else 7
                axes.plot(*zip(*points, strict=True), marker=marker, markersize=size, label=kind)
                for point, score in zip(points, members, strict=True):
                    if "τ" in score.decoder:
                        tau = score.decoder.partition("τ=")[2]
                        axes.annotate(tau, point, (4, 5), textcoords="offset points", fontsize=8)
            axes.set(xlabel=name, ylabel="right, %" if checked else "texts exactly AR's, %")
            axes.set_xlim(0, None)
            axes.grid(alpha=0.3)
        panels[0][column].set_title(regime.replace("_", " "))
    panels[0][0].legend()
    save_figure(figure, path)


def _kind(score: Score) -> str:
    return score.decoder.partition(" τ")[0]
