"""Draws the losses of runs side by side: `python -m docs.losses RUN RUN ... --plot FILE`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from infer.plots import new_figure, save_figure

KINDS = {"mlm_loss": "masked tokens", "ar_loss": "next tokens"}
LAST = 10


def losses(run: Path, kind: str) -> tuple[list[int], list[float]]:
    """Returns the steps that a run logged, and its losses at these."""
    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text("utf-8").splitlines()]
    return [line["step"] for line in lines], [line[kind] for line in lines]


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.losses", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--plot", type=Path, required=True, metavar="FILE", help="an .svg to write")
    options = parser.parse_args(arguments)
    for run in options.runs:
        if not (run / "metrics.jsonl").is_file():
            parser.error(f"{run}: no metrics.jsonl here, so this is not the folder of a run")
    figure = new_figure(10, 4)
    for axes, (kind, title) in zip(figure.subplots(1, 2), KINDS.items(), strict=True):
        for run in options.runs:
            steps, values = losses(run, kind)
            axes.plot(steps, values, label=run.name, linewidth=1)
            mean = sum(values[-LAST:]) / len(values[-LAST:])
            print(f"{run.name}: {title} {mean:.4f}, mean of the last {len(values[-LAST:])} lines")
        axes.set(xlabel="step", ylabel="loss, nats", title=title)
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
