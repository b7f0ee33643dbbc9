"""Scores as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from infer.evaluate import Score


def score_table(scores: Sequence[Score]) -> Table:
    """A row per regime and decoder; the speed-up is against the regime's first decoder."""
    # Narrow enough for a terminal of 80 columns.
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("regime", no_wrap=True)
    table.add_column("decoder", no_wrap=True)
    for name in ("accuracy", "tokens/\nforward", "p_cache", "tokens/\nsecond", "speed-\nup"):
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
            "-" if score.accuracy is None else f"{score.accuracy:.1%}",
            f"{score.tokens_per_forward:.2f}",
            f"{score.p_cache:.2f}",
            f"{score.tokens_per_second:,.0f}",
            f"{score.tokens_per_second / reference.tokens_per_second:.2f}x",
        )
    return table
