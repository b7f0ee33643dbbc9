"""How rows reach the engine: the one place that knows what `LLM.run` takes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM, Completion, Progress, Row

ROWS_AT_A_TIME = 1024
"""Enough for rows of similar length to meet in a batch."""


def completions(
    llm: LLM,
    rows: Iterator[Row],
    on_progress: Callable[[Progress], None],
    stopping: Callable[[], bool],
) -> Iterator[list[tuple[int, Completion]]]:
    """Decodes rows as they come.

    Args:
      rows: prepared; asked for only as they are needed, and in the thread that calls.
      on_progress: is told the sums over all the rows so far.
      stopping: whether to begin no more rows.

    Yields:
      Places of rows in ``rows``, from 0, and what became of them, in any order.
    """
    # LLM.run takes a list, so the rows go to it a list at a time.
    first, before = 0, (0, 0, 0)
    while some := list(itertools.islice(rows, ROWS_AT_A_TIME)):
        last = (0, 0, 0)

        def tell(now: Progress, before: tuple[int, int, int] = before) -> None:
            nonlocal last
            last = (now.finished, now.tokens, now.forwards)
            finished, tokens, forwards = (a + b for a, b in zip(before, last, strict=True))
            on_progress(
                dataclasses.replace(now, finished=finished, tokens=tokens, forwards=forwards)
            )

        for batch in llm.run(some, tell):
            yield [(first + place, completion) for place, completion in batch]
            if stopping():
                return
        finished, tokens, forwards = (a + b for a, b in zip(before, last, strict=True))
        first, before = first + len(some), (finished, tokens, forwards)
