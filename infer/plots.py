"""Figures, for which alone matplotlib is imported; and `wedlm plot`, which draws a trace, slots
against forwards.

Tested by tests/infer/test_trace.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError, counted, require_extra
from wedlm_jax.host.atomic import check_writable
from wedlm_jax.host.command_line import CommandParser

PALE = 2.0
"""Nats of entropy with the palest colour; higher entropies look the same."""
FORMATS = (".svg", ".png", ".pdf")


def check_plot(path: str | Path) -> None:
    """Refuses a plot that could not be drawn, before anything is measured."""
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
    # Without a date, the same figures give the same file.
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


# --- wedlm plot -----------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm plot",
        description="Draws a trace from `wedlm generate --trace` or the page of `wedlm serve`:\n"
        "each forward is a row, each place in the completion a column. Colour is the\n"
        "entropy of the forward's prediction there; outlines show what it committed,\n"
        "filled out of order, and rejected.",
        epilog="example:\n"
        '  wedlm generate --prompt "Once upon a time" --trace out.json && wedlm plot out.json',
    )
    parser.add_argument("trace", metavar="TRACE", help="trace file")
    output = ".svg, .png or .pdf [the trace's name with .svg]"
    parser.add_argument("--output", metavar="FILE", help=output)
    options = parser.parse_args(arguments)

    from infer.trace import read_trace

    trace = Path(options.trace)
    path = trace.with_suffix(".svg") if options.output is None else Path(options.output)
    check_plot(path)
    sequences = read_trace(trace)
    try:
        figure = drawn(sequences)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, TypeError, ValueError):
        raise InputError(f"{trace}: this trace is damaged") from None
    save_figure(figure, path)
    print(path)
    return 0


def drawn(sequences: Sequence[dict[str, Any]]) -> Any:
    """Returns a figure with a panel per sequence, all to the same scale."""
    rows = [len(sequence["forwards"]) for sequence in sequences]
    forwards = [forward for sequence in sequences for forward in sequence["forwards"]]
    places = max(forward["start"] + len(forward["slots"]) for forward in forwards) + 1
    if places > 1 + sum(len(forward["slots"]) for forward in forwards):
        raise ValueError("a forward starts after all that was filled")
    width = min(max(places * 0.16, 6), 16)
    # Each panel needs room for its title and labels in addition to its rows.
    heights = [min(max(count * 0.16, 0.9), 10) for count in rows]
    figure = new_figure(width + 1.5, sum(heights) + 0.9 * len(rows) + 0.6)
    panels = figure.subplots(len(rows), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    image = None
    for axes, sequence in zip(panels, sequences, strict=True):
        image = _draw(axes, sequence, places)
    panels[-1].set_xlabel("place in the completion")
    figure.colorbar(image, ax=list(panels), label="entropy, nats", extend="max", aspect=30)
    figure.legend(handles=list(_legend()), loc="outside lower center", ncols=4, frameon=False)
    return figure


EARLY, REJECTED, FILLED = "#e8a200", "#c0341d", "#5c7cfa"
COMMITTED: dict[str, Any] = {
    "marker": "o",
    "markersize": 4,
    "color": "white",
    "markeredgecolor": "black",
    "linestyle": "",
}


def _draw(axes: Any, sequence: dict[str, Any], places: int) -> Any:
    import numpy as np
    from matplotlib.patches import Rectangle

    values, outlines = np.full((len(sequence["forwards"]), places), np.nan), []
    length = 0
    for row, forward in enumerate(sequence["forwards"]):
        start = forward["start"]
        for slot, entropy in enumerate(forward["entropies"]):
            if entropy is not None and start + slot >= 0:
                values[row, start + slot] = entropy
        early = set(forward["out_of_order"])
        for slot, _ in forward["filled"]:
            outlines.append((start + slot, row, EARLY if slot in early else FILLED))
        outlines += [(start + slot, row, REJECTED) for slot in forward["rejected"]]
        for place in range(length, length + len(forward["committed"])):
            axes.plot(place, row, **COMMITTED)
        length += len(forward["committed"])
    image = axes.imshow(values, cmap="Blues_r", vmin=0, vmax=PALE, aspect="auto")
    for place, row, colour in outlines:
        corner = (place - 0.42, row - 0.42)
        axes.add_patch(Rectangle(corner, 0.84, 0.84, fill=False, edgecolor=colour, linewidth=1.2))
    counts = sequence["forwards"][-1]
    axes.set(
        title=f"{sequence['mode']}: {counted(length, 'token')} in "
        f"{counted(counts['num_forwards'], 'forward')}",
        ylabel="forward",
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    return image


def _legend() -> Iterator[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    yield Line2D([], [], label="committed", **COMMITTED)
    for colour, name in (
        (FILLED, "filled in order"),
        (EARLY, "filled out of order"),
        (REJECTED, "rejected"),
    ):
        yield Patch(fill=False, edgecolor=colour, label=name)
