"""Measures tokens per second on a regime's questions, by way of decoding and batch size."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from rich.table import Table

from infer.bench.constants import Constants, by_products, constants_table, measure
from infer.bench.measure import Report, by_turns, table
from infer.bench.rival import RIVAL, RIVAL_RECOMPUTE, Rival
from infer.bench.subject import Regimes, Subject, Work, forget_programs
from infer.plots import new_figure, save_figure
from infer.score import ratios_by_turns
from wedlm_jax.completion import Completion, Drafts, total_drafts
from wedlm_jax.engine.config import MOST_LOOKUP
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.errors import InputError
from wedlm_jax.generation import Generation
from wedlm_jax.params import SamplingParams

SHORT_PASS = 1.0
"""Seconds; the figures of a shorter pass depend on what else the machine is doing."""


class Way(NamedTuple):
    """A way to decode.

    Attributes:
      window, lookup: its engine's window and maximum number of copied drafts.
      mode, draft: what its requests ask for.
      copy: number of its engine among equal ones.
    """

    name: str
    window: int | str
    lookup: int = 0
    mode: str = "verified"
    draft: str = "auto"
    copy: int = 0

    @property
    def engine(self) -> tuple[int | str, int, int]:
        """Ways with the same value share an engine."""
        return self.window, self.lookup, self.copy

    def work(self, prompts: Sequence[list[int]], params: SamplingParams) -> Work:
        """Returns the prompts as work, each with its own seed."""
        params = dataclasses.replace(params, mode=self.mode, draft=self.draft)
        return [(ids, dataclasses.replace(params, seed=n)) for n, ids in enumerate(prompts)]


AR = Way("AR", 0, draft="none")
AR_AGAIN = AR._replace(name="AR again", copy=1)
"""The control: what it differs from AR by is noise."""


def window_ways(windows: Sequence[int | str], modes: Sequence[str]) -> list[Way]:
    """Lists each window in each mode. AR, which has no modes, is first, with its control if
    ``windows`` has 0 twice."""
    every = [(window, mode) for mode in modes for window in windows if window != 0]
    ways = [Way(f"W = {window}, {mode}", window, mode=mode) for window, mode in every]
    return [AR, AR_AGAIN][: list(windows).count(0)] + ways


def draft_ways(drafts: Sequence[str], windows: Sequence[int | str], *, masks: bool) -> list[Way]:
    """Lists AR, then mode verified with each draft source (a value of ``SamplingParams.draft``).

    Args:
      windows: the windows of "masks" and "both", which are listed with each of them.
      masks: whether the model was trained on masks; if not, these two are left out.

    Raises:
      InputError: none of the sources is left.
    """
    ways = [AR]
    for draft in drafts:
        lookup = 0 if draft == "masks" else MOST_LOOKUP
        if draft in ("masks", "both"):
            ways += [
                Way(f"{draft}, W = {window}", window, lookup, draft=draft)
                for window in windows
                if masks and window != 0
            ]
        else:
            name = "lookup, always" if draft == "lookup" else draft
            ways.append(Way(name, "auto" if masks else 0, lookup, draft=draft))
    if len(ways) == 1:
        raise InputError(f"--draft {drafts[0]}: the model was not trained on masks")
    return ways


@dataclasses.dataclass(frozen=True)
class Speed:
    """One way to decode a set of prompts.

    Attributes:
      sequences: number of sequences that decode together.
      prompts, tokens, forwards: counts of one pass over all prompts.
      seconds: wall-clock time of each timed pass, prefill included, compiling excluded.
      compile_seconds: time spent compiling; programs kept from earlier runs are not compiled again.
      drafts: drafts checked and accepted in one pass, by source.
      computed: forwards of the device in one pass, and real tokens in them, prompt tokens included;
        None for a rival.
      by_products: speed-up over the first way if only matrix products took time.
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
    computed: tuple[int, int] | None = None
    by_products: float | None = None

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(statistics.median(self.seconds), 1e-9)


class _Pass(NamedTuple):
    """All prompts decoded once."""

    tokens: int
    forwards: int
    seconds: float
    compile_seconds: float = 0.0
    drafts: Drafts = Drafts()
    computed: tuple[int, int] | None = None


def compare_windows(
    subject: Subject, regimes: Regimes, options: Mapping[str, Any], report: Report
) -> None:
    """Measures AR and windows; reports each regime at each number of sequences as it is done."""
    measured: list[Speed] = []
    ways = window_ways(options["window_size"], options["mode"])
    for speeds in _speeds(subject, regimes, ways, options, report):
        measured += speeds
        if options["plot"] is not None:
            draw_speeds(measured, Path(options["plot"]))
        report.add("windows", speeds, speed_table(speeds))


def compare_drafts(
    subject: Subject, regimes: Regimes, options: Mapping[str, Any], report: Report
) -> None:
    """Measures AR and each draft source, in the same way."""
    masks = subject.config.knows_masks
    ways = draft_ways(options["draft"], options["window_size"], masks=masks)
    for speeds in _speeds(subject, regimes, ways, options, report):
        report.add("drafts", speeds, speed_table(speeds))


def _speeds(
    subject: Subject,
    regimes: Regimes,
    ways: Sequence[Way],
    options: Mapping[str, Any],
    report: Report,
) -> Iterator[list[Speed]]:
    """Yields the speeds of all ways and of the rival. Reports the machine's constants first."""
    rival, passes = options["rival"], options["passes"]
    constants: Constants | None = None
    for sequences in options["batch_size"]:
        engines = {
            way.engine: subject.engine(way.window, sequences, lookup=way.lookup)
            for way in {way.engine: way for way in ways}.values()
        }
        most = options["prompts"] or max(2 * sequences, 24)
        for regime, questions in regimes.items():
            asked = [subject.ask(question) for question in questions[:most]]
            params = SamplingParams(max_tokens=options["max_tokens"])
            runs: dict[str, Callable[[], _Pass]] = {
                way.name: partial(_decode, subject, engines[way.engine], way.work(asked, params))
                for way in ways
            }
            if rival is not None:
                runs |= _rival_runs(rival, asked, sequences, ways, params)
            made = by_turns(runs, passes, f"{sequences} sequences, {regime}")
            if constants is None:
                constants = measure(engines[ways[0].engine])
                report.add("constants", [constants], constants_table(constants))
            speeds = [_speed(way, regime, sequences, len(asked), made[way]) for way in runs]
            yield [_with_expected(speed, speeds[0], constants) for speed in speeds]
            runs.clear()
        engines.clear()
        forget_programs()


def _speed(way: str, regime: str, sequences: int, prompts: int, passes: Sequence[_Pass]) -> Speed:
    """Returns the speed over the timed passes: all but the first, which compiled."""
    last = passes[-1]
    return Speed(
        way,
        regime,
        sequences,
        prompts,
        last.tokens,
        last.forwards,
        seconds=[one.seconds for one in passes[1:]],
        compile_seconds=sum(one.compile_seconds for one in passes),
        drafts=last.drafts._asdict(),
        computed=last.computed,
    )


def _with_expected(speed: Speed, first: Speed, constants: Constants) -> Speed:
    if speed.computed is None or first.computed is None or speed is first:
        return speed
    if len(constants.tokens) < 2:  # no forward over several tokens was timed
        return speed
    expected = by_products(constants, speed.computed, first.computed)
    return dataclasses.replace(speed, by_products=expected * speed.tokens / max(first.tokens, 1))


def completions_of(
    subject: Subject, engine: Engine, work: Work, finished: Callable[[int], None] | None = None
) -> list[Completion]:
    """Decodes prompts as `LLM.generate` does; returns their completions in order. Calls
    ``finished`` with the number of completions so far."""
    found: dict[int, Completion] = {}
    for some in Generation(EngineLoop(engine), subject.codec, work):
        found.update(some)
        if finished is not None:
            finished(len(found))
    return [found[number] for number in range(len(work))]


def _decode(subject: Subject, engine: Engine, work: Work) -> _Pass:
    """Decodes all prompts without cached prefixes. Compiling is not counted."""
    engine.scheduler.forget_prefixes()
    counted = engine.device.counters.copy()
    clock = engine.clock()
    done = completions_of(subject, engine, work)
    seconds, compiling = clock.seconds, clock.compiling
    run, instances, _ = (engine.device.counters - counted).tolist()
    tokens = sum(len(one.token_ids) for one in done)
    forwards = sum(one.num_forwards for one in done)
    drafts = total_drafts(done)
    return _Pass(tokens, forwards, seconds, compiling, drafts, (run, instances))


def _rival_runs(
    rival: Rival,
    prompts: Sequence[list[int]],
    sequences: int,
    ways: Sequence[Way],
    params: SamplingParams,
) -> dict[str, Callable[[], _Pass]]:
    """Returns the rival's passes by name: AR and, for one sequence at a time, its own drafters if
    a way copies drafts, and whole forwards without a cache if a way is in mode "paper"."""
    plain = partial(rival.decode, prompts, max_tokens=params.max_tokens, sequences=sequences)
    runs: dict[str, Callable[[], _Pass]] = {}
    runs[RIVAL] = partial(_time_rival, rival, plain, alone=False)
    if sequences == 1 and any(way.lookup for way in ways):
        for name in rival.drafters:
            runs[name] = partial(_time_rival, rival, partial(plain, drafter=name))
    if sequences == 1:
        for window in dict.fromkeys(way.window for way in ways if way.mode == "paper"):
            if isinstance(window, int) and window:
                whole = partial(rival.recompute, prompts, window=window, params=params)
                runs[f"{RIVAL_RECOMPUTE}, W = {window}"] = partial(_time_rival, rival, whole)
    return runs


def _time_rival(
    rival: Rival, decode: Callable[[], list[list[int]]], *, alone: bool = True
) -> _Pass:
    """Times a pass of the rival. With ``alone``, sequences decode one after another, and forwards
    are counted; otherwise a batch's forward counts once for each sequence that has not ended, which
    in AR is once per token."""
    before, started = rival.forwards, time.perf_counter()
    answers = decode()
    seconds = time.perf_counter() - started
    tokens = sum(len(answer) for answer in answers)
    return _Pass(tokens, rival.forwards - before if alone else tokens, seconds)


def speed_table(speeds: Sequence[Speed]) -> Table:
    """Makes a table of the speeds of one comparison, with ratios to the first."""
    first = speeds[0]
    rows = [
        {
            "way": speed.way,
            "tokens/s": f"{speed.tokens_per_second:,.0f}",
            f"against {first.way}": _spread(ratios_by_turns(speed, first)),
            "by products": f"{speed.by_products:.2f}×" if speed.by_products else "",
            "tokens / forward": f"{speed.tokens / max(speed.forwards, 1):.2f}",
            "drafts accepted": ", ".join(_right(speed.drafts)),
            "compiling, s": f"{speed.compile_seconds:.0f}" if speed.compile_seconds else "",
        }
        for speed in speeds
    ]
    title = (
        f"{first.regime.replace('_', ' ')}, {first.sequences} at a time, {first.prompts} prompts"
    )
    shortest = min(statistics.median(speed.seconds) for speed in speeds)
    short = f"passes of {shortest:.1f} s are too short to trust: more --prompts make them longer"
    return table(title, rows, caption=short if shortest < SHORT_PASS else None)


def _spread(ratios: Sequence[float]) -> str:
    """Formats the median of several ratios, with the smallest and the largest."""
    median = f"{statistics.median(ratios):.2f}×"
    least, most = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
    return median if least == most else f"{median} ({least}–{most})"


def _right(drafts: Mapping[str, int]) -> Iterator[str]:
    for source in ("masks", "lookup"):
        if drafts.get(source):
            share = drafts[f"{source}_accepted"] / drafts[source]
            yield f"{source} {share:.0%} of {drafts[source]:,}"


def draw_speeds(speeds: Sequence[Speed], path: Path) -> None:
    """Draws tokens per second by number of sequences: a line per way, a panel per regime."""
    regimes = list(dict.fromkeys(speed.regime for speed in speeds))
    figure = new_figure(5.5 * len(regimes), 4.5)
    ticks = sorted({speed.sequences for speed in speeds})
    panels = figure.subplots(1, len(regimes), squeeze=False)[0]
    for axes, regime in zip(panels, regimes, strict=True):
        shown = [speed for speed in speeds if speed.regime == regime]
        for way in dict.fromkeys(speed.way for speed in shown):
            points = [(s.sequences, s.tokens_per_second) for s in shown if s.way == way]
            style = "--" if "verified" in way else ":" if "transformers" in way else "-"
            axes.plot(*zip(*points, strict=True), style, marker="o", label=way)
        axes.set(
            xscale="log",
            xlabel="sequences at a time",
            ylabel="tokens per second",
            ylim=(0, None),
            title=regime.replace("_", " "),
        )
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    save_figure(figure, path)
