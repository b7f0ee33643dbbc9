"""Verified decoding against autoregressive decoding: how many completions are not the same.

Where one is not, how close AR's two best tokens were at the first place that differs says why:
only ties within rounding may go another way.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from infer.bench.drafts import NAMES
from infer.bench.subject import Subject, forget_programs
from infer.bench.windows import name_of
from infer.bench.work import Regimes, Work
from wedlm_jax.engine.config import MOST_LOOKUP
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.generation import Generation
from wedlm_jax.params import SamplingParams

if TYPE_CHECKING:
    from wedlm_jax.benchmark import Bar
    from wedlm_jax.completion import Completion
    from wedlm_jax.engine.engine import Engine
    from wedlm_jax.records.questions import Question


@dataclasses.dataclass(frozen=True)
class Agreement:
    """Completions of one way of decoding beside those of AR.

    Attributes:
      way: AR, a window in mode verified, or drafts from the text.
      dtype: of weights and cache.
      prompts, tokens: that were completed, and of the completions.
      tokens_per_forward: of them.
      differ: completions that are not those of AR.
      median_margin, largest_margin: nats between AR's two best tokens where completions first
        differ; of AR itself at all places. None where there is no such place.
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
    subject: Subject,
    regimes: Regimes,
    *,
    batch_size: int,
    windows: Sequence[int | str],
    drafts: Sequence[str] | None,
    prompts: int | None,
    temperature: float,
    max_tokens: int,
    bar: Bar,
) -> Iterator[Agreement]:
    """Decodes the same prompts by AR, then with each window and with drafts from the text; yields
    AR's own figures first. A deterministic engine is compared with itself: AR is decoded anew in
    the engine of each way.

    Args:
      batch_size: sequences that decode together.
      windows: of masks.
      drafts: values of ``SamplingParams.draft``: "masks" stands for the windows, the others for
        drafts from the text; None for what the model knows.
      prompts: of all regimes by turns; all by default.
      temperature: 0 is greedy; above it, each prompt has a seed of its own, the same every time.
      max_tokens: of a completion.
    """

    def decode(name: str, window: int | str, lookup: int, draft: str) -> list[Completion]:
        engine = subject.engine(window, batch_size, lookup=lookup)
        bar.begin(name)
        work = _work(subject, asked, SamplingParams(draft=draft, logprobs=2, **sampling))
        completions = _completions(subject, engine, work)
        del engine
        forget_programs()
        return completions

    asked = list(itertools.islice(_all_by_turns(regimes), prompts))
    sampling: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    # The shape of a deterministic engine follows from its window: only within one are both alike.
    alike = bool(subject.engine_options.get("deterministic"))
    masks = subject.config.knows_masks
    drafts = (["masks"] if masks else ["lookup", "auto"]) if drafts is None else drafts
    ways: list[tuple[str, int | str, int, str]] = []
    if masks and "masks" in drafts:
        ways += [(name_of(window, "verified"), window, 0, "masks") for window in windows]
    ways += [(NAMES[one], 0, MOST_LOOKUP, one) for one in drafts if one != "masks"]
    bar.expect(1 + len(ways) * (1 + alike))
    expected = decode(name_of(0, "ar"), 0, 0, "none")
    margins = [_margin(one, place) for one in expected for place in range(len(one.token_ids))]
    yield _agreement(name_of(0, "ar"), subject.dtype, expected, 0, margins)
    for name, window, lookup, draft in ways:
        if alike:
            expected = decode(name_of(0, "ar"), window, lookup, "none")
        found = decode(name, window, lookup, draft)
        places = first_differences(expected, found)
        margins = [_margin(expected[number], place) for number, place in places.items()]
        yield _agreement(name, subject.dtype, found, len(places), margins)


def first_differences(
    expected: Sequence[Completion], found: Sequence[Completion]
) -> dict[int, int]:
    """Returns, by the number of each completion that differs, the first place where it does."""
    places = {}
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        pairs = itertools.zip_longest(one.token_ids, other.token_ids)
        place = next((place for place, (a, b) in enumerate(pairs) if a != b), None)
        if place is not None:
            places[number] = place
    return places


def _margin(completion: Completion, place: int) -> float:
    """Returns nats between the two most probable tokens of a place."""
    assert completion.logprobs is not None
    (_, best), (_, second) = completion.logprobs[place].top[:2]
    return best - second


def _agreement(
    way: str,
    dtype: str,
    completions: Sequence[Completion],
    differ: int,
    margins: Sequence[float],
) -> Agreement:
    tokens = sum(len(one.token_ids) for one in completions)
    return Agreement(
        way,
        dtype,
        prompts=len(completions),
        tokens=tokens,
        tokens_per_forward=tokens / max(sum(one.num_forwards for one in completions), 1),
        differ=differ,
        median_margin=statistics.median(margins) if margins else None,
        largest_margin=max(margins, default=None),
    )


def _all_by_turns(regimes: Regimes) -> Iterator[Question]:
    """Lists the first question of every regime, then the second of every one, and so on; none
    twice."""
    for some in itertools.zip_longest(*regimes.values()):
        yield from (question for question in some if question is not None)


def _work(subject: Subject, questions: Sequence[Question], params: SamplingParams) -> Work:
    return [
        (subject.chat_prompt(question.prompt), dataclasses.replace(params, seed=number))
        for number, question in enumerate(questions)
    ]


def _completions(subject: Subject, engine: Engine, work: Work) -> list[Completion]:
    found = dict(
        item for some in Generation(EngineLoop(engine), subject.codec, work) for item in some
    )
    return [found[number] for number in range(len(work))]
