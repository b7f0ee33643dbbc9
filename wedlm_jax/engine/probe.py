"""Measures once what the forwards of an engine's programs cost, and stores that with the programs.

Dummy sequences decode dummy texts: each runs the last token of its text and a window of masks,
never drafts (its draft budget is 0), so its token count is the same in every forward. A dummy
prompt shows what a larger forward costs. Dummies write into arbitrary pages, so measuring comes
before the first real sequence.

Tested by tests/wedlm_jax/engine/test_windowless.py.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from wedlm_jax.engine.costs import OVERHEAD, CostTable, kept_table
from wedlm_jax.engine.device import Device
from wedlm_jax.engine.interface import Admission, Burst, Report, Request
from wedlm_jax.host.compiled_cache import folder_of_jax
from wedlm_jax.host.progress import MEASURING
from wedlm_jax.params import SamplingParams

T = TypeVar("T")

TEXT = 64
"""The length of dummy texts in tokens, if the engine allows it."""
ROUNDS, SECONDS, LEAST = 3, 4.0, 2
"""How often each size is timed, the time limit, and the minimum number of sizes. The fastest round
counts, since other load on the machine only slows forwards down. After the time limit and the
minimum number of sizes, timing stops; the costs of other sizes are interpolated."""
PROMPT = 4
"""The size of the timed prompt, as a multiple of the largest decode forward."""
SHORT, LONG = 2, 10
"""The lengths of two bursts, in forwards; the difference of their times separates the cost of
forwards from overhead."""
LEAST_OVERHEAD = 1e-4
"""Lower bound on a burst's overhead in seconds; noise can make the measured one smaller."""
EMPTY = 20
"""How often a burst without forwards is timed."""
SLOW = 0.1
"""If the shorter burst takes this many seconds, the longer one is skipped."""


def forward_costs(device: Device, mesh: Mesh | None, folder: Path | None = None) -> CostTable:
    """Returns the costs of forwards by number of tokens, stored by an earlier process or measured.

    Args:
      device: a device prepared for all traits that its programs will have, and not in use yet.
      mesh: the model's mesh; None for a single device.
      folder: where the engine's programs are stored; by default JAX's compilation cache.
    """

    def found() -> CostTable:
        device.compile(device.traits)
        with device.programs.busy(MEASURING):
            return measured(device)

    return kept_table(folder or folder_of_jax(), _key(device, mesh), found)


def _key(device: Device, mesh: Mesh | None) -> dict[str, Any]:
    """Returns everything that the costs depend on."""
    settings = device.settings
    return {
        "jax": jax.__version__,
        "devices": [jax.devices()[0].device_kind, len(jax.devices())],
        "model": dataclasses.asdict(device.config),
        "dtypes": sorted({str(x.dtype) for x in jax.tree.leaves(device.parameters)}),
        "mesh": None if mesh is None else dict(mesh.shape),
        "cache": [str(settings.cache_dtype), settings.page_size],
        "program": repr(settings.program(device.traits)),
    }


def empty_burst_seconds(device: Device) -> float:
    """Returns the seconds of a burst without forwards, the minimum of several. No sequence may be
    running."""
    empty = _burst(device, np.full(device.settings.sequences, -1, np.int32), [], 0)
    device.run(empty)  # compiles
    times = []
    for _ in range(EMPTY):
        started = time.perf_counter()
        device.run(empty)
        times.append(time.perf_counter() - started)
    return min(times)


def measured(device: Device) -> CostTable:
    """Times forwards of all sizes, with windows and without."""
    settings, traits = device.settings, device.traits
    each, sizes = settings.sequences_each, settings.program(traits).sizes.tokens
    # A program that copies drafts has room for as many masks, which cost the same.
    widest = max(traits.window, traits.lookup)
    reach = each * (1 + widest)
    timed = [size for size, before in zip(sizes, (0, *sizes), strict=False) if before < reach]
    todo = [(min(size, reach), False) for size in timed if size > 1 or not traits.window]
    if traits.window:
        todo += [(size, True) for size in {*(size for size in sizes if size < each), each}]
    # Full batches come first: they matter most and take longest. Among these, and among the small
    # ones, the extremes come first, since costs between two timed sizes are inferred best.
    todo.sort(key=lambda one: one[::-1])
    full = spread([one for one in todo if one[0] >= each])
    small = spread([one for one in todo if one[0] < each])
    turns = [one for pair in itertools.zip_longest(full, small) for one in pair if one is not None]
    prompt = next((size for size in sizes if size >= PROMPT * reach), sizes[-1])
    if prompt > timed[-1]:
        turns += [(prompt, windowless) for windowless in {False, traits.window > 0}]
    started = time.perf_counter()
    fastest: dict[tuple[int, bool], dict[int, float]] = {}
    for _ in range(ROUNDS):
        for one in turns:
            if len(fastest) >= LEAST and time.perf_counter() - started > SECONDS:
                break
            times = _timed_prompt if one[0] > timed[-1] else _timed
            for forwards, seconds, report in times(device, *one):
                size = report.sizes[int(report.by_size.argmax())]
                known = fastest.setdefault((size, report.windowless), {})
                known[forwards] = min(seconds, known.get(forwards, seconds))
    return interpolated(sizes, fastest)


def interpolated(
    sizes: Sequence[int], bursts: Mapping[tuple[int, bool], Mapping[int, float]]
) -> CostTable:
    """Returns the costs of all sizes, given the seconds of some bursts.

    Args:
      sizes: static sizes of a forward.
      bursts: seconds by number of forwards, for each pair of a size and whether the program is the
        one without windows.
    """
    costs: dict[bool, dict[int, float]] = {False: {}, True: {}}
    overheads = []
    once: list[tuple[bool, int, int]] = []
    for (size, windowless), known in bursts.items():
        (short, begin), (forwards, end) = min(known.items()), max(known.items())
        cost = end / forwards
        if forwards == short:
            once.append((windowless, size, forwards))
        elif end > begin:
            cost = (end - begin) / (forwards - short)
            overheads.append(begin - short * cost)
        costs[windowless][size] = cost
    overhead = max(float(np.median(overheads)), LEAST_OVERHEAD) if overheads else OVERHEAD
    for windowless, size, forwards in once:
        # A single burst cannot separate its overhead, so the usual one is subtracted; noise must
        # not make the cost negative.
        cost = costs[windowless][size]
        costs[windowless][size] = max(cost - overhead / forwards, cost / 2)
    for one in costs.values():
        # A forward of fewer tokens takes no longer; if it seemed to, other work delayed it.
        for larger, smaller in itertools.pairwise(sorted(one, reverse=True)):
            one[smaller] = min(one[smaller], one[larger])

    def at(known: dict[int, float], usual: np.ndarray) -> np.ndarray:
        """Interpolates ratios to the ``usual`` costs, on logarithmic scales."""
        places = sorted(known)
        ratios = [np.log(known[size] / usual[sizes.index(size)]) for size in places]
        return np.exp(np.interp(np.log(sizes), np.log(places), ratios)) if places else 1 + 0 * usual

    seconds = at(costs[False] or costs[True], np.ones(len(sizes)))
    return CostTable(sizes, seconds.tolist(), at(costs[True], seconds).tolist(), overhead)


def spread(sizes: Sequence[T]) -> list[T]:
    """Returns ascending sizes in another order: both ends, then the middle of each gap, the widest
    gaps first."""
    order, gaps = [*range(len(sizes))][:: max(len(sizes) - 1, 1)], [(0, len(sizes) - 1)]
    for low, high in gaps:
        if high - low > 1:
            middle = (low + high) // 2
            order.append(middle)
            gaps += [(low, middle), (middle, high)]
    return [sizes[i] for i in order]


def _windows(device: Device, tokens: int, windowless: bool) -> np.ndarray:
    """Returns windows that together run ``tokens`` tokens in each replica; −1 for no sequence. They
    are spread over as many sequences as possible, because each sequence adds the cost of attention
    to its text. Unless ``windowless``, at least one has a window."""
    each = device.settings.sequences_each
    count = min(max(tokens - (not windowless), 1), each)
    windows = np.full(each, -1, np.int32)
    base, more = divmod(tokens, count)
    windows[:count] = base - 1
    windows[:more] += 1
    return np.tile(windows, device.settings.replicas)


def _timed(device: Device, tokens: int, windowless: bool) -> Iterator[tuple[int, float, Report]]:
    """Times a short and a longer burst of forwards with ``tokens`` tokens; yields the length in
    forwards, the seconds and the report of each."""
    windows = _windows(device, tokens, windowless)
    running = np.flatnonzero(windows >= 0).tolist()
    length = max(min(TEXT, device.settings.max_text // 2), 1)
    # All but the last token count as computed: the contents of the pages do not matter.
    entering = [_admission(device, index, length, length - 1) for index in running]
    # The first run at a size is slow.
    device.run(_burst(device, np.minimum(windows, device.traits.window), entering, 1))
    seconds = 0.0
    for forwards in (SHORT, LONG):
        if seconds < SLOW:
            started = time.perf_counter()
            report = device.run(_burst(device, windows, [], forwards))
            seconds = time.perf_counter() - started
            yield forwards, seconds, report
    device.run(_burst(device, windows, [], 0, released=running))


def _timed_prompt(
    device: Device, tokens: int, windowless: bool
) -> Iterator[tuple[int, float, Report]]:
    """Times a burst of one forward, which computes a prompt and, unless ``windowless``, the first
    window; yields the same as `_timed`."""
    settings = device.settings
    window = 0 if windowless else device.traits.window
    windows = np.full(settings.sequences, -1, np.int32)
    windows[:: settings.sequences_each] = window
    running = np.flatnonzero(windows >= 0).tolist()
    length = max(min(tokens - window - 1, settings.chunk_tokens, settings.max_text // 2), 1)
    entering = [_admission(device, index, length, 0) for index in running]
    started = time.perf_counter()
    report = device.run(_burst(device, windows, entering, 1))
    yield 1, time.perf_counter() - started, report
    device.run(_burst(device, windows, [], 0, released=running))


def _admission(device: Device, index: int, length: int, num_cached: int) -> Admission:
    params = SamplingParams(
        mode="verified" if device.traits.verified else "paper",
        draft_budget=0.0,
        entropy_threshold=None,
        ignore_eos=True,
        max_tokens=device.settings.max_text,
    )
    text = np.zeros(length, np.int32)
    return Admission(index, Request(-1, text.tolist(), params), text, num_cached, None)


def _burst(
    device: Device,
    windows: np.ndarray,
    admissions: list[Admission],
    forwards: int,
    released: list[int] | None = None,
) -> Burst:
    settings = device.settings
    count, columns = settings.sequences, settings.max_pages
    numbers = 1 + np.arange(count * columns) % (settings.num_pages - 1)
    return Burst(
        released=released or [],
        admissions=admissions,
        page_table=numbers.reshape(count, columns).astype(np.int32),
        capacity=np.full(count, columns * settings.page_size, np.int32),
        arrival=np.tile(np.arange(settings.sequences_each, dtype=np.int32), settings.replicas),
        windows=np.maximum(windows, 0),
        chunk_tokens=settings.chunk_tokens,
        max_forwards=forwards,
        until_finished=np.full(settings.replicas, count + 1),
    )
