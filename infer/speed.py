"""How fast a set of prompts was decoded, and such speeds as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way to decode a set of prompts.

    Attributes:
      way: its name.
      rows: prompts that decode together.
      prompts, tokens, forwards: of one pass, over all prompts.
      seconds: wall-clock of each timed pass.
    """

    way: str
    rows: int
    prompts: int
    tokens: int
    forwards: int
    seconds: list[float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Speeds of one comparison, beside the first of them."""
    result = Table(box=box.SIMPLE, title=f"{speeds[0].rows} rows, {speeds[0].prompts} prompts")
    result.add_column("")
    for head in ("tokens/s", f"against {speeds[0].way}", "tokens / forward"):
        result.add_column(head, justify="right")
    for speed in speeds:
        ratio = speed.tokens_per_second / speeds[0].tokens_per_second
        per_forward = f"{speed.tokens_per_forward:.2f}"
        result.add_row(speed.way, f"{speed.tokens_per_second:,.0f}", f"{ratio:.2f}×", per_forward)
    return result
