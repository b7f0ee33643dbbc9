"""How fast a set of prompts was decoded, and such speeds as a table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Mapping, Sequence

from rich import box
from rich.table import Table


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way to decode a set of prompts.

    Attributes:
      way, regime: names.
      sequences: that decode together.
      prompts, tokens, forwards: of one pass, over all prompts.
      seconds: wall-clock of each timed pass, prompts included, compiling not.
      compile_seconds: spent on compiling before, less what was kept from earlier runs.
      drafts: checked and accepted in one pass, by where they came from.
    """

    way: str
    regime: str
    sequences: int
    prompts: int
    tokens: int
    forwards: int
    seconds: list[float]
    compile_seconds: float
    drafts: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(statistics.median(self.seconds), 1e-9)

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)


def _right(drafts: Mapping[str, int]) -> Iterator[str]:
    for source in ("masks", "lookup"):
        if drafts.get(source):
            share = drafts[f"{source}_accepted"] / drafts[source]
            yield f"{source} {share:.0%} of {drafts[source]:,}"


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Makes a table of the speeds of one comparison, beside the first of them."""
    first = speeds[0]
    regime = first.regime.replace("_", " ")
    result = Table(
        box=box.SIMPLE, title=f"{regime}, {first.sequences} at a time, {first.prompts} prompts"
    )
    result.add_column("")
    heads = ("tokens/s", f"against {first.way}", "tokens / forward", "drafts right", "compiling, s")
    for head in heads:
        result.add_column(head, justify="right")
    for speed in speeds:
        result.add_row(
            speed.way,
            f"{speed.tokens_per_second:,.0f}",
            f"{speed.tokens_per_second / first.tokens_per_second:.2f}×",
            f"{speed.tokens_per_forward:.2f}",
            ", ".join(_right(speed.drafts)),
            f"{speed.compile_seconds:.0f}" if speed.compile_seconds else "",
        )
    return result
