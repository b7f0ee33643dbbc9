"""Verified decoding against autoregressive decoding: how many completions differ.

Where one differs, the margin between AR's two most likely tokens at the first difference says why:
only ties within rounding may go another way.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from infer.bench.measure import Report, table
from infer.bench.speeds import AR, Way, completions_of, draft_ways
from infer.bench.subject import Regimes, Subject, forget_programs
from wedlm_jax.completion import Completion
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.params import SamplingParams


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Completions of one way of decoding, compared with AR's.

    Attributes:
      way: AR, or a source of drafts in mode verified, with its window.
      dtype: dtype of weights and cache.
      tokens: number of tokens in the completions of all prompts.
      differ: number of completions that differ from AR's.
      median_margin, largest_margin: nats between AR's two most likely tokens where completions
        first differ; for AR itself, at all places. None if there is no such place.
    """

    way: str
    dtype: str
    prompts: int
    tokens: int
    tokens_per_forward: float
    differ: int
    median_margin: float | None
    largest_margin: float | None


def compare_identity(
    subject: Subject, regimes: Regimes, options: Mapping[str, Any], report: Report
) -> None:
    """Decodes the same prompts by AR, then with each window of masks and with drafts from the text;
    reports AR's own figures first.

    Args:
      options: parsed options. With ``draft`` "masks" and "both" the windows are used, other values
        copy from the text, and None chooses what the model supports. ``prompts`` is the number of
        prompts of all regimes together.
    """
    masks = subject.config.knows_masks
    drafts = options["draft"] or (["masks"] if masks else ["lookup", "auto"])
    ways = draft_ways(drafts, options["window_size"], masks=masks)[1:]
    by_turns = (one for some in itertools.zip_longest(*regimes.values()) for one in some if one)
    asked = [subject.ask(one) for one in itertools.islice(by_turns, options["prompts"])]
    params = SamplingParams(
        temperature=options["temperature"], max_tokens=options["max_tokens"], logprobs=2
    )
    for batch_size in options["batch_size"]:
        agreements = []
        for agreement in _agreements(subject, asked, params, ways, batch_size):
            agreements.append(agreement)
            report.add("identity", [agreement])
        report.add("identity", [], identity_table(agreements))


def _agreements(
    subject: Subject,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    ways: Sequence[Way],
    batch_size: int,
) -> Iterator[Agreement]:
    """Yields AR's figures and those of every way. A deterministic engine is compared with itself:
    its shape depends on its window, so AR is decoded again in the engine of each way."""

    def decode(way: Way, engine_of: Way) -> list[Completion]:
        engine = subject.engine(engine_of.window, batch_size, lookup=engine_of.lookup)
        title = f"{batch_size} sequences, {way.name}"
        with ProgressBar("completions", total=len(prompts), title=title) as bar:
            completions = completions_of(subject, engine, way.work(prompts, params), bar.update)
        del engine
        forget_programs()
        return completions

    expected = decode(AR, AR)
    margins = [_margin(one, place) for one in expected for place in range(len(one.token_ids))]
    yield _agreement(AR, subject, expected, 0, margins)
    for way in ways:
        if subject.options.get("deterministic"):
            expected = decode(AR, way)
        found = decode(way, way)
        places = first_differences(expected, found)
        margins = [_margin(expected[number], place) for number, place in places.items()]
        yield _agreement(way, subject, found, len(places), margins)


def first_differences(
    expected: Sequence[Completion], found: Sequence[Completion]
) -> dict[int, int]:
    """Returns the first place where each differing completion differs, by its number."""
    places = {}
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        pairs = itertools.zip_longest(one.token_ids, other.token_ids)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            places[number] = place
    return places


def _margin(completion: Completion, place: int) -> float:
    """Returns the nats between the two most likely tokens of a place."""
    assert completion.logprobs is not None
    (_, best), (_, second) = completion.logprobs[place].top[:2]
    return best - second


def _agreement(
    way: Way,
    subject: Subject,
    completions: Sequence[Completion],
    differ: int,
    margins: Sequence[float],
) -> Agreement:
    tokens = sum(len(one.token_ids) for one in completions)
    return Agreement(
        way.name,
        subject.dtype,
        prompts=len(completions),
        tokens=tokens,
        tokens_per_forward=tokens / max(sum(one.num_forwards for one in completions), 1),
        differ=differ,
        median_margin=statistics.median(margins) if margins else None,
        largest_margin=max(margins, default=None),
    )


def identity_table(agreements: Sequence[Agreement]) -> Table:
    """Makes the table of ways to decode; AR itself comes first."""
    ar, *others = agreements
    rows = [
        {
            "way": one.way,
            "differ": f"{one.differ} ({one.differ / one.prompts:.1%})" if one.differ else "0",
            "nats there, median": one.median_margin,
            "largest": one.largest_margin,
            "tokens / forward": f"{one.tokens_per_forward:.2f}",
        }
        for one in others
    ]
    return table(
        f"{ar.prompts:,} completions, {ar.tokens:,} tokens by AR, {ar.dtype}",
        rows,
        f"AR's two most likely tokens: {ar.median_margin or 0:.3g} nats apart (median)",
    )
