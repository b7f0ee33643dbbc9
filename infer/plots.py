"""Figures of measured scores and speeds; matplotlib is imported only to draw them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wedlm_jax.errors import InputError, require_extra
from wedlm_jax.host.atomic import check_writable

if TYPE_CHECKING:
    from infer.score import Score
    from infer.speed import Speed

FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: str | Path) -> None:
    """Refuses what could not be drawn, before anything is measured.

    Raises:
      InputError: matplotlib is not installed, the folder is not there, or the ending is none of
        `FORMATS`.
    """
    if Path(path).suffix not in FORMATS:
        raise InputError(f"{path}: a plot's name ends with one of {', '.join(FORMATS)}")
    check_writable(Path(path))
    require_extra("a plot", "plot", "matplotlib")


def new_figure(width: float, height: float) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"  # text stays text
    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    # Without a date the same figures make the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_scores(scores: Sequence[Score], path: Path) -> None:
    """Draws what is right, or is exactly AR's where nothing is to be right or wrong, against tokens
    per forward and against the speed: a column for each regime."""
    regimes = list(dict.fromkeys(score.regime for score in scores))
    figure = new_figure(4 * len(regimes), 7)
    panels = figure.subplots(2, len(regimes), squeeze=False)
    for column, regime in enumerate(regimes):
        some = [score for score in scores if score.regime == regime]
        checked = some[0].accuracy is not None
        for row, name in enumerate(("tokens per forward", "speed-up against AR, wall-clock")):
            axes = panels[row][column]
            for kind in dict.fromkeys(_kind(score) for score in some):
                members = [score for score in some if _kind(score) == kind]
                points = [
                    (
                        s.tokens_per_second / some[0].tokens_per_second
                        if row
                        else s.tokens_per_forward,
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


def draw_speeds(speeds: Iterable[Speed], path: str | Path) -> None:
    """Draws tokens per second by batch size, one line per decoder, one panel per regime."""
    every = list(speeds)
    regimes = list(dict.fromkeys(speed.regime for speed in every))
    figure = new_figure(5.5 * len(regimes), 4.5)
    ticks = sorted({speed.sequences for speed in every})
    panels = figure.subplots(1, len(regimes), squeeze=False)[0]
    for axes, regime in zip(panels, regimes, strict=True):
        some = [speed for speed in every if speed.regime == regime]
        for way in dict.fromkeys(speed.way for speed in some):
            points = [(s.sequences, s.tokens_per_second) for s in some if s.way == way]
            style = "--" if "verified" in way else ":" if "transformers" in way else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=way)
        axes.set(
            xscale="log",
            xlabel="sequences at a time",
            ylabel="tokens per second",
            ylim=(0, None),
            title=regime.replace("_", " "),
        )
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(figure, Path(path))
