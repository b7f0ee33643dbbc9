"""Tables of what was measured."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from rich import box
from rich.table import Table

from infer.bench.chunks import CHUNK, ChunkCost
from infer.bench.floor import ForwardCost, PromptCost
from infer.bench.gaps import LONG, Gap
from infer.bench.identity import Agreement
from infer.bench.pages import PageUse
from infer.bench.soak import SoakSample, growth


def forward_table(costs: Sequence[ForwardCost]) -> Table:
    """Makes the table of forwards with one number of sequences; a rival's time is set against the
    first."""
    table = _table(
        f"a forward, {costs[0].sequences} sequences",
        "ms",
        "products alone, ms",
        "×",
        "tokens",
        "computed",
    )
    for cost in costs:
        median = statistics.median(cost.milliseconds)
        if cost.floor:
            floor = (f"{statistics.median(cost.floor):.3f}", f"{cost.ratio:.2f}")
            counts = (f"{cost.tokens:.1f}", f"{cost.computed:.1f}")
        else:
            floor, counts = ("", ""), ("", "")
        table.add_row(cost.way, f"{median:.3f}", *floor, *counts)
    return table


def prompt_table(costs: Sequence[PromptCost]) -> Table:
    """Makes the table of requests for one token."""
    table = _table(
        f"a request for one token, prompts of {costs[0].tokens:.0f} tokens",
        "ms",
        "in programs",
        "host",
        "less a decode forward",
    )
    for cost in costs:
        table.add_row(
            cost.way,
            f"{statistics.median(cost.request):.2f}",
            f"{statistics.median(cost.device):.2f}",
            f"{cost.host:.2f}",
            f"{cost.fixed:.2f}",
        )
    return table


def gap_table(gaps: Sequence[Gap]) -> Table:
    """Makes the table of gaps between bursts with one number of sequences; each three ways are set
    against the first of them, which has long bursts."""
    table = _table(
        f"bursts, {gaps[0].sequences} sequences",
        "ms",
        "× long bursts",
        "bursts",
        "the device waits, ms",
    )
    long = gaps[0]
    for gap in gaps:
        long = gap if gap.way.endswith(LONG) else long
        median = statistics.median(gap.seconds)
        times = median / statistics.median(long.seconds)
        waits = "" if math.isnan(gap.waits) else f"{gap.waits:.2f}"
        table.add_row(gap.way, f"{median * 1e3:.1f}", f"{times:.2f}", f"{gap.bursts:.0f}", waits)
    return table


def page_table(uses: Sequence[PageUse]) -> Table:
    """Makes the table of pages and tokens in use."""
    first = uses[0]
    table = _table(
        f"mixed lengths, {first.sequences} sequences while others wait",
        "useful tokens",
        "places held",
        "with spans",
        f"fit for {first.rectangles} rectangles",
        "×",
        "put back",
    )
    for use in uses:
        table.add_row(
            use.way,
            f"{use.useful:.1%}",
            f"{use.held:.1%}",
            f"{use.written:.1%}",
            f"{use.fitting:.1f}",
            f"{use.gain:.1f}",
            str(use.preemptions),
        )
    return table


def chunk_table(cost: ChunkCost) -> Table:
    """Makes the table of a long prompt among others."""
    beside = f"{cost.forward_tokens:.0f} a forward beside others"
    title = f"a prompt of {cost.tokens:,} tokens, {beside}"
    table = Table(box=box.SIMPLE, title=title, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row(f"its first {CHUNK:,} tokens, alone", f"{cost.first:,.1f} ms")
    table.add_row(f"its last {CHUNK:,} tokens, alone", f"{cost.last:,.1f} ms")
    table.add_row("the last against the first", f"{cost.last / cost.first:.2f}×")
    table.add_row("what visible products say", f"{cost.products:.2f}×")
    table.add_row("one against the other", f"{cost.against_products:.2f}")
    table.add_row("others, token to token, alone", f"{cost.quiet:.2f} ms")
    table.add_row("others, token to token, meanwhile, on average", f"{cost.busy:.2f} ms")
    table.add_row("one against the other", f"{cost.slowdown:.2f}×")
    table.add_row("the longest meanwhile", f"{cost.longest:.2f} ms")
    table.add_row("bursts without a token for one of them", str(cost.stalled))
    table.add_row("the prompt, among them", f"{cost.among:.2f} s")
    table.add_row("the prompt, alone", f"{cost.alone:.2f} s")
    return table


def identity_table(agreements: Sequence[Agreement]) -> Table:
    """Makes the table of windows in mode verified; AR itself comes first."""
    ar = agreements[0]
    table = _table(
        f"{ar.prompts:,} completions, {ar.tokens:,} tokens by AR, {ar.dtype}",
        "that differ",
        "nats there, median",
        "at most",
        "tokens / forward",
    )
    table.caption = (
        f"between AR's two best tokens: {ar.median_margin or 0:.3g} nats, the median of all places"
    )
    for one in agreements[1:]:
        margins = (one.median_margin, one.largest_margin)
        table.add_row(
            one.way,
            f"{one.differ} ({one.differ / one.prompts:.1%})" if one.differ else "0",
            *("" if nats is None else f"{nats:.2g}" for nats in margins),
            f"{one.tokens_per_forward:.2f}",
        )
    return table


def soak_table(samples: Sequence[SoakSample]) -> Table:
    """Makes the table of a long run: its end against the end of its first quarter."""
    last, quarter = samples[-1], samples[len(samples) // 4]
    table = Table(box=box.SIMPLE, title=f"random lengths, {last.way}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_row("minutes", f"{last.minutes:,.1f}")
    table.add_row("prompts", f"{last.prompts:,}")
    table.add_row("completion tokens", f"{last.tokens:,}")
    table.add_row("programs compiled on the way", str(last.compiled))
    table.add_row(
        f"memory after {quarter.minutes:,.1f} minutes", f"{quarter.resident_mib:,.0f} MiB"
    )
    table.add_row("memory at the end", f"{last.resident_mib:,.0f} MiB")
    table.add_row("grown by", f"{growth(samples):+.1%}")
    return table


def _table(title: str, *heads: str) -> Table:
    table = Table(box=box.SIMPLE, title=title)
    table.add_column("", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right")
    return table
