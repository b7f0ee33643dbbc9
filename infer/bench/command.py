"""`wedlm bench`: the command. What is compared is in a file each beside this one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import TYPE_CHECKING

from infer.bench.options import (
    BATCH_SIZES,
    DRAFTS,
    LONG_PROMPT,
    MINUTES,
    MODES,
    PASSES,
    WINDOWS,
    parse,
    regimes_of,
)
from wedlm_jax.benchmark import Bar, Outcome, report

if TYPE_CHECKING:
    from infer.bench.rival import Rival
    from infer.bench.subject import Subject
    from infer.bench.work import Regimes


def main(arguments: list[str]) -> int:
    from infer.bench.rival import check_rival

    options = parse(arguments)
    if options.rival is not None:
        check_rival()
    regimes = None if options.shape is not None else regimes_of(options)

    return report(lambda bar: _compare(options, regimes, bar), options.output)


def _compare(options: argparse.Namespace, regimes: Regimes | None, bar: Bar) -> Iterator[Outcome]:
    from infer.bench.rival import Rival

    subject = rival = None
    if set(options.compare) - {"chunks"}:
        subject = _subject(options)
        if options.rival is not None:
            rival = Rival(subject)
    for name in options.compare:
        if name == "chunks" or subject is None:
            yield _chunks(options, bar)
        elif name == "soak":
            yield from _soak(options, subject, bar)
        elif name == "floor":
            yield from _floor(options, subject, regimes, rival, bar)
        elif regimes is not None:
            compare = {
                "windows": _windows,
                "drafts": _drafts,
                "gaps": _gaps,
                "pages": _pages,
                "identity": _identity,
            }[name]
            yield from compare(options, subject, regimes, rival, bar)


def _subject(options: argparse.Namespace) -> Subject:
    from infer.bench.subject import SHAPES, load_subject, random_subject

    held = {
        "quantization": options.quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "deterministic": options.deterministic,
    }
    if options.shape is None:
        return load_subject(options.model, options.dtype, **held)
    return random_subject(SHAPES[options.shape], options.dtype, **held)


def _windows(
    options: argparse.Namespace, subject: Subject, regimes: Regimes, rival: Rival | None, bar: Bar
) -> Iterator[Outcome]:
    from infer.bench.windows import compare_windows
    from infer.plots import draw_speeds
    from infer.speed import Speed, speed_table

    measured: list[Speed] = []
    for speeds in compare_windows(
        subject,
        regimes,
        batch_sizes=options.batch_size or BATCH_SIZES["windows"],
        windows=options.window_size or WINDOWS["windows"],
        modes=options.mode or MODES["windows"],
        prompts=options.prompts,
        passes=options.passes or PASSES,
        rival=rival,
        bar=bar,
    ):
        measured += speeds
        if options.plot is not None:
            draw_speeds(measured, options.plot)
        yield Outcome("windows", speeds, speed_table(speeds))


def _drafts(
    options: argparse.Namespace, subject: Subject, regimes: Regimes, rival: Rival | None, bar: Bar
) -> Iterator[Outcome]:
    from infer.bench.drafts import compare_drafts
    from infer.speed import speed_table

    for speeds in compare_drafts(
        subject,
        regimes,
        batch_sizes=options.batch_size or BATCH_SIZES["drafts"],
        drafts=options.draft or DRAFTS,
        prompts=options.prompts,
        passes=options.passes or PASSES,
        rival=rival,
        bar=bar,
    ):
        yield Outcome("drafts", speeds, speed_table(speeds))


def _gaps(
    options: argparse.Namespace, subject: Subject, regimes: Regimes, _: Rival | None, bar: Bar
) -> Iterator[Outcome]:
    from infer.bench.gaps import compare_gaps
    from infer.bench.tables import gap_table

    for gaps in compare_gaps(
        subject,
        regimes,
        batch_sizes=options.batch_size or BATCH_SIZES["gaps"],
        windows=_fixed(options, "gaps"),
        modes=options.mode or MODES["gaps"],
        passes=options.passes or PASSES,
        bar=bar,
    ):
        yield Outcome("gaps", gaps, gap_table(gaps))


def _pages(
    options: argparse.Namespace, subject: Subject, regimes: Regimes, _: Rival | None, bar: Bar
) -> Iterator[Outcome]:
    from infer.bench.pages import compare_pages
    from infer.bench.tables import page_table

    for uses in compare_pages(
        subject,
        regimes,
        batch_sizes=options.batch_size or BATCH_SIZES["pages"],
        windows=_fixed(options, "pages"),
        modes=options.mode or MODES["pages"],
        bar=bar,
    ):
        yield Outcome("pages", uses, page_table(uses))


def _identity(
    options: argparse.Namespace, subject: Subject, regimes: Regimes, _: Rival | None, bar: Bar
) -> Iterator[Outcome]:
    from infer.bench.identity import compare_identity
    from infer.bench.tables import identity_table
    from infer.bench.work import MAX_TOKENS

    for batch_size in options.batch_size or BATCH_SIZES["identity"]:
        agreements = []
        for agreement in compare_identity(
            subject,
            regimes,
            batch_size=batch_size,
            windows=[w for w in options.window_size or WINDOWS["identity"] if w],
            drafts=options.draft,
            prompts=options.prompts,
            temperature=options.temperature or 0.0,
            max_tokens=options.max_tokens or MAX_TOKENS,
            bar=bar,
        ):
            agreements.append(agreement)
            yield Outcome("identity", [agreement])
        yield Outcome("identity", [], identity_table(agreements))


def _soak(options: argparse.Namespace, subject: Subject, bar: Bar) -> Iterator[Outcome]:
    from infer.bench.soak import failure_of, soak
    from infer.bench.tables import soak_table
    from infer.bench.windows import ways_of

    windows, modes = options.window_size or WINDOWS["soak"], options.mode or MODES["soak"]
    for batch_size in options.batch_size or BATCH_SIZES["soak"]:
        for window, mode in ways_of(windows, modes):
            samples = []
            minutes = MINUTES if options.minutes is None else options.minutes
            for sample in soak(
                subject, window, mode, batch_size=batch_size, minutes=minutes, bar=bar
            ):
                samples.append(sample)
                yield Outcome("soak", [sample])
            yield Outcome("soak", [], soak_table(samples), failure_of(samples))


def _floor(
    options: argparse.Namespace,
    subject: Subject,
    regimes: Regimes | None,
    rival: Rival | None,
    bar: Bar,
) -> Iterator[Outcome]:
    from infer.bench.floor import ForwardCost, compare_floor
    from infer.bench.tables import forward_table, prompt_table

    for costs in compare_floor(
        subject,
        regimes,
        batch_sizes=options.batch_size or ([1] if regimes is None else BATCH_SIZES["floor"]),
        windows=_fixed(options, "floor"),
        modes=options.mode or MODES["floor"],
        passes=options.passes or PASSES,
        rival=rival,
        bar=bar,
    ):
        if isinstance(costs[0], ForwardCost):
            forwards = [cost for cost in costs if isinstance(cost, ForwardCost)]
            yield Outcome("floor", forwards, forward_table(forwards))
        else:
            prompts = [cost for cost in costs if not isinstance(cost, ForwardCost)]
            yield Outcome("prompts", prompts, prompt_table(prompts))


def _fixed(options: argparse.Namespace, name: str) -> list[int]:
    """Returns the windows that are numbers."""
    windows = options.window_size or WINDOWS[name]
    return [window for window in windows if isinstance(window, int)]


def _chunks(options: argparse.Namespace, bar: Bar) -> Outcome:
    from infer.bench.chunks import compare_chunks
    from infer.bench.tables import chunk_table

    cost = compare_chunks(
        options.shape or "embedded",
        tokens=LONG_PROMPT if options.prompt_tokens is None else options.prompt_tokens,
        dtype=options.dtype,
        passes=options.passes or PASSES,
        bar=bar,
    )
    return Outcome("chunks", [cost], chunk_table(cost))
