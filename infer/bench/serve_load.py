"""`python -m infer.bench.serve_load`: `wedlm serve` under load, and a job over the same prompts.

A server process answers clients of another process on the loopback, as many prompts at a time as
there are clients: tokens a second against decoding the same prompts offline, once as many at a time
as the server may and once as many as there are clients; the client's share of the processors' time;
and the times to the first token and between tokens. Then the same once more, while a third of the
clients go away in the middle of their answers: every other answer must be the offline one, no page
may be held afterwards, and memory must be flat.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from infer.bench.load_client import Ask, Heard, ask_all
from infer.evaluate import EMBEDDED_QUESTIONS
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.records.questions import read_questions

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM

LONGEST_PROMPT, LONGEST_ANSWER = 400, 160
"""Tokens. Lengths are drawn so that their logarithms are uniform."""
LEAVING = 1 / 3
"""Of the clients."""
GROWTH_ALLOWED = 0.05
"""Of the server's memory, from a quarter of the way to the end."""


@dataclasses.dataclass(frozen=True)
class Load:
    """Holds what so many clients at a time got.

    Attributes:
      tokens_per_second: of all answers together.
      offline: the same of a job over the same prompts.
      offline_as_wide: of a job that decodes at most as many at a time as there are clients.
      client_share: of the CPU seconds of both processes.
      first, between: seconds to the first token, and between tokens: medians and 95th percentiles.
    """

    clients: int
    requests: int
    tokens_per_second: float
    offline: float
    offline_as_wide: float
    client_share: float
    first: tuple[float, float]
    between: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The share of the job's speed."""
        return self.tokens_per_second / self.offline

    @property
    def ratio_as_wide(self) -> float:
        """Returns the share of the speed of a job that decodes as many sequences at a time."""
        return self.tokens_per_second / self.offline_as_wide


@dataclasses.dataclass(frozen=True)
class Soundness:
    """Holds what was wrong while clients went away.

    Attributes:
      answers: that were heard to their end.
      wrong: of these, those that are not the offline ones.
      errors: of the server's.
      pages_held: afterwards.
      growth: of the server's memory.
    """

    answers: int
    left: int
    wrong: int
    errors: list[str]
    pages_held: int
    growth: float

    @property
    def is_sound(self) -> bool:
        fine = not (self.wrong or self.errors or self.pages_held)
        return fine and self.growth <= GROWTH_ALLOWED


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m infer.bench.serve_load",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", metavar="DIR", help="checkpoint folder [the embedded model]")
    add("--requests", type=int, default=2000, metavar="N", help="[2000]")
    add("--clients", type=int, nargs="+", default=[1, 4, 16, 64], metavar="N", help="[1 4 16 64]")
    add("--batch-size", type=int, default=16, metavar="N", help="of server and job [16]")
    add("--mode", choices=("paper", "verified", "ar"), default="verified", help="[verified]")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and lengths [0]")
    add("--output", metavar="FILE", help="also write all figures as JSON")
    add("--plot", metavar="FILE", help="also draw the times (.svg, .png or .pdf)")
    options = parser.parse_args(arguments)
    if min([options.requests, options.batch_size, *options.clients]) < 1:
        raise InputError("--requests, --clients and --batch-size: expected at least 1")
    if options.plot is not None:
        from infer.plots import check_plot

        check_plot(options.plot)
    loads, sound = compare(options)
    _tell(loads, sound)
    if options.output is not None:
        figures = {"loads": [dataclasses.asdict(one) for one in loads]}
        text = json.dumps(figures | {"soundness": dataclasses.asdict(sound)}, indent=1)
        Path(options.output).write_text(text + "\n", encoding="utf-8")
    if options.plot is not None:
        draw_loads(loads, options.plot)
    return 0 if sound.is_sound else 1


def compare(options: argparse.Namespace) -> tuple[list[Load], Soundness]:
    """Measures everything. Numbers of clients below the most get fewer requests: they take longer
    for each, and prompts of their own, so that none is in the cache. Job and server take turns:
    the speed of a shared machine changes within minutes."""
    most = max(options.clients)
    rng = np.random.default_rng(options.seed)
    loads, asks, answers = [], list[Ask](), list[list[int]]()
    with (
        _offline(options, options.batch_size) as llm,
        _serving(options) as (process, port),
    ):
        for clients in sorted(options.clients):
            share = options.requests * clients // most
            count = max(share, options.requests // 20, 2 * clients)
            asks = _asks(llm, rng, count, options.mode)
            answers, speed = _decode(llm, asks)
            as_wide = speed
            if clients < options.batch_size:
                with _offline(options, clients) as narrow:
                    as_wide = _decode(narrow, asks)[1]
            own, server = time.process_time(), _cpu_seconds(process.pid)
            heard, seconds = asyncio.run(ask_all(port, asks, clients))
            own, server = time.process_time() - own, _cpu_seconds(process.pid) - server
            loads.append(_load(clients, heard, seconds, (speed, as_wide), own / (own + server)))
        sound = _go_away(process.pid, port, asks, answers, most, options.seed)
    return loads, sound


def _asks(llm: LLM, rng: np.random.Generator, count: int, mode: str) -> list[Ask]:
    """Calls with texts of the held-out questions, cut anywhere; each fourth one draws."""
    questions = [q for some in read_questions(Path(EMBEDDED_QUESTIONS)).values() for q in some]
    longest = min(LONGEST_PROMPT, llm.engine.max_model_len - LONGEST_ANSWER)

    def length(most: int) -> int:
        return round(float(np.exp(rng.uniform(0, np.log(most)))))

    asks = []
    for number in range(count):
        ids: list[int] = []
        wanted = length(longest)
        while len(ids) < wanted:
            question = questions[int(rng.integers(len(questions)))]
            ids += llm.as_ids(f"{question.prompt} {question.answer}\n")
        fields: dict[str, Any] = {
            "prompt": ids[:wanted],
            "max_tokens": length(LONGEST_ANSWER),
            "mode": mode,
            "ignore_eos": True,
            "seed": int(rng.integers(2**32)),
            "temperature": 0.7 if number % 4 == 0 else 0.0,
        }
        asks.append(Ask(fields))
    return asks


@contextlib.contextmanager
def _offline(options: argparse.Namespace, at_once: int) -> Iterator[LLM]:
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

    llm = LLM(options.model, max_batch_size=at_once)
    llm.warm_up(SamplingParams(mode=options.mode, temperature=0.7))
    yield llm
    llm.engine.release()


def _decode(llm: LLM, asks: Sequence[Ask]) -> tuple[list[list[int]], float]:
    """Decodes the same prompts as a job; returns its answers and its tokens a second."""
    from wedlm_jax.params import SamplingParams

    prepared = []
    for ask in asks:
        fields = dict(ask.fields)
        prepared.append(llm.prepare_one(fields.pop("prompt"), SamplingParams(**fields)))
    started = time.perf_counter()
    done = dict(item for some in llm.run(prepared) for item in some)
    seconds = time.perf_counter() - started
    ids = [done[place].token_ids for place in range(len(asks))]
    return ids, sum(map(len, ids)) / seconds


@contextlib.contextmanager
def _serving(options: argparse.Namespace) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Starts a server process; yields its port."""
    command = [sys.executable, "-m", "wedlm_jax", "serve", "--port", "0"]
    command += ["--batch-size", str(options.batch_size), "--mode", options.mode]
    command += ["--temperature", "0.7"]  # the program that draws, as offline
    if options.model is not None:
        command += ["--model", options.model]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEDLM_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r":(\d+)/v1$", line.strip())
        if found is None:
            raise InputError(f"the server did not begin: {line.strip()!r}")
        yield process, int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def _load(
    clients: int,
    heard: Sequence[Heard],
    seconds: float,
    offline: tuple[float, float],
    client_share: float,
) -> Load:
    if errors := [one.error for one in heard if one.error is not None]:
        raise InputError(f"{len(errors)} calls failed; the first: {errors[0]}")
    tokens = sum(len(one.token_ids) for one in heard)
    first = [one.first for one in heard]
    between = [gap for one in heard for gap in one.gaps] or [0.0]
    return Load(
        clients,
        len(heard),
        tokens / seconds,
        *offline,
        client_share,
        _quantiles(first),
        _quantiles(between),
    )


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    return float(np.median(values)), float(np.quantile(values, 0.95))


def _go_away(
    pid: int, port: int, asks: Sequence[Ask], expected: Sequence[list[int]], clients: int, seed: int
) -> Soundness:
    """Sends all requests once more, while a third of the clients disconnect in the middle."""
    rng = np.random.default_rng(seed + 1)
    leaving = [
        dataclasses.replace(ask, leave_after=1 + len(ids) // 2) if rng.random() < LEAVING else ask
        for ask, ids in zip(asks, expected, strict=True)
    ]
    quarter = len(asks) // 4
    heard, _ = asyncio.run(ask_all(port, leaving[:quarter], clients))
    before = _resident_bytes(pid)
    more, _ = asyncio.run(ask_all(port, leaving[quarter:], clients))
    heard += more
    deadline = time.monotonic() + 30
    while (held := _metric(port, 'wedlm_pages{of="running"}')) and time.monotonic() < deadline:
        time.sleep(0.1)
    whole = [
        (one, ids)
        for one, ids in zip(heard, expected, strict=True)
        if one.finish_reason is not None
    ]
    return Soundness(
        answers=len(whole),
        left=len(heard) - len(whole),
        wrong=sum(one.token_ids != ids for one, ids in whole),
        errors=[one.error for one in heard if one.error is not None],
        pages_held=int(held),
        growth=_resident_bytes(pid) / before - 1,
    )


def _cpu_seconds(pid: int) -> float:
    """Returns the processors' time that a process has had; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    """Returns the memory that a process has in use; Linux only."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _metric(port: int, name: str) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


def _tell(loads: Sequence[Load], sound: Soundness) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title="wedlm serve on the loopback", box=box.SIMPLE)
    columns = ("clients", "requests", "tokens/s", "of the job's", "of one as wide")
    times = ("to the first token, ms", "between tokens, ms")
    for column in (*columns, "client's CPU", *times):
        table.add_column(column, justify="right")
    for load in loads:
        told = (
            f"{1000 * median:.1f} (95 %: {1000 * late:.1f})"
            for median, late in (load.first, load.between)
        )
        table.add_row(
            str(load.clients),
            str(load.requests),
            f"{load.tokens_per_second:,.0f}",
            f"{load.ratio:.2f}",
            f"{load.ratio_as_wide:.2f}",
            f"{load.client_share:.1%}",
            *told,
        )
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"{sound.left} clients went away; of {sound.answers} answers {sound.wrong} are not the "
        f"job's; {len(sound.errors)} errors; {sound.pages_held} pages held afterwards; memory "
        f"{sound.growth:+.1%}"
    )


def draw_loads(loads: Sequence[Load], path: str) -> None:
    """Draws the times against the number of clients: medians, and 95th percentiles above."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.fonttype"] = "none"
    figure = Figure(figsize=(10, 4), layout="constrained")
    clients = [load.clients for load in loads]
    for axes, name, what in zip(
        figure.subplots(1, 2),
        ("first", "between"),
        ("to the first token", "between tokens"),
        strict=True,
    ):
        for place, label in enumerate(("median", "95 %")):
            values = [1000 * getattr(load, name)[place] for load in loads]
            axes.plot(clients, values, "-o" if not place else "--o", label=label)
        axes.set(xscale="log", yscale="log", xlabel="clients at a time", ylabel=f"ms {what}")
        axes.set_xticks(clients, [str(one) for one in clients])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)


if __name__ == "__main__":
    sys.exit(run_command("python -m infer.bench.serve_load", lambda: main(sys.argv[1:])))
