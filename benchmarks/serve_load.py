"""Measures `wedlm serve` under load, and a job over the same prompts.

A server process answers clients in another process over the loopback, one prompt per client at a
time: tokens per second against decoding the same prompts offline, once with the server's batch size
and once with as many sequences as clients; the clients' share of CPU time; and medians and 95th
percentiles of the times to the first token and between tokens. Whether answers are the job's, and
what remains of clients that disconnect, is tested in tests/infer/serve/test_soak.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.load_client import Ask, Heard, ask_all
from benchmarks.options import add_numbers, new_parser
from infer.bench.measure import Report, table
from infer.evaluate import EMBEDDED_QUESTIONS
from infer.flags import add_engine_options
from infer.plots import check_plot, new_figure, save_figure
from wedlm_jax.errors import InputError
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions

LONGEST_PROMPT, LONGEST_ANSWER = 400, 160
"""Tokens. Lengths are drawn log-uniformly."""
FIRST, BETWEEN = "to the first token", "between tokens"
QUANTILES = {"ms": 0.5, "95 %": 0.95}
"""The quantile of the times that each column shows, by the suffix of its heading."""


def main(arguments: Sequence[str]) -> int:
    parser = new_parser("serve_load", __doc__, passes=None)
    add = parser.add_argument
    add_engine_options(parser, names=("model",))
    add_numbers(parser, "--requests", 2000, "prompts for the most clients; fewer clients get fewer")
    add_numbers(parser, "--clients", [1, 4, 16, 64], "clients at a time")
    add_numbers(parser, "--batch-size", 16, "sequences that decode together, in server and job")
    modes = ("paper", "verified", "ar")
    add("--mode", choices=modes, default="verified", help="how they are decoded [verified]")
    add("--seed", type=int, default=0, metavar="N", help="seed for prompts and lengths [0]")
    plot = "also draw the times (.svg, .png or .pdf)"
    add("--plot", default=None, metavar="FILE", help=plot)
    options = parser.parse_args(arguments)
    if options.plot is not None:
        check_plot(options.plot)
    report = Report(options.output)
    loads = compare(options)
    report.add("loads", loads, table("wedlm serve on the loopback", loads))
    if options.plot is not None:
        draw_loads(loads, Path(options.plot))
    return 0


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measures each number of clients. Fewer clients get fewer requests, since each takes longer,
    and each number gets its own prompts, so that none is cached. Job and server take turns, since
    the speed of a shared machine changes within minutes. Each decodes other prompts first, from
    which its engine learns which windows pay."""
    most = max(options.clients)
    rng = np.random.default_rng(options.seed)
    loads: list[dict[str, Any]] = []
    narrower = sum(clients < options.batch_size for clients in options.clients)
    turns = ProgressBar("turns", total=2 * len(options.clients) + narrower, title="serve_load")
    with turns, _offline(options, options.batch_size) as llm, _serving(options) as (pid, port):
        for clients in sorted(options.clients):
            share = options.requests * clients // most
            count = max(share, options.requests // 6, 2 * clients)
            first, asks = (_asks(llm, rng, n, options.mode) for n in (max(20, 2 * clients), count))
            _tokens_per_second(llm, first)
            speed = as_wide = _tokens_per_second(llm, asks)
            turns.advance(title=f"{count:,} prompts, {clients} at a time")
            if clients < options.batch_size:
                with _offline(options, clients) as narrow:
                    _tokens_per_second(narrow, first)
                    as_wide = _tokens_per_second(narrow, asks)
                turns.advance()
            asyncio.run(ask_all(port, first, clients))
            client, server = time.process_time(), _cpu_seconds(pid)
            heard, seconds = asyncio.run(ask_all(port, asks, clients))
            client, server = time.process_time() - client, _cpu_seconds(pid) - server
            turns.advance()
            cpu_share = client / (client + server)
            loads.append(load_of(clients, heard, seconds, (speed, as_wide), cpu_share))
    return loads


def _asks(llm: LLM, rng: np.random.Generator, count: int, mode: str) -> list[Ask]:
    """Makes calls with texts of the held-out questions, cut anywhere; every fourth one samples."""
    questions = [q for some in read_questions(Path(EMBEDDED_QUESTIONS)).values() for q in some]
    longest = min(LONGEST_PROMPT, llm.engine.max_model_len - LONGEST_ANSWER)

    def length(most: int) -> int:
        return round(float(np.exp(rng.uniform(0, np.log(most)))))

    asks = []
    for number in range(count):
        ids: list[int] = []
        prompt_length = length(longest)
        while len(ids) < prompt_length:
            question = questions[int(rng.integers(len(questions)))]
            ids += llm.as_ids(f"{question.prompt} {question.answer}\n")
        fields: dict[str, Any] = {
            "prompt": ids[:prompt_length],
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
    llm = LLM(getattr(options, "model", None), max_batch_size=at_once)
    llm.warm_up(SamplingParams(mode=options.mode, temperature=0.7))
    yield llm
    llm.engine.release()


def _tokens_per_second(llm: LLM, asks: Sequence[Ask]) -> float:
    """Decodes the same prompts as a job; returns its speed."""
    params = [{name: ask.fields[name] for name in ask.fields if name != "prompt"} for ask in asks]
    started = time.perf_counter()
    done = llm.generate(
        [ask.fields["prompt"] for ask in asks], [SamplingParams(**one) for one in params]
    )
    return sum(len(one.token_ids) for one in done) / (time.perf_counter() - started)


@contextlib.contextmanager
def _serving(options: argparse.Namespace) -> Iterator[tuple[int, int]]:
    """Starts a server process; yields its id and its port."""
    command = [sys.executable, "-m", "wedlm_jax", "serve", "--port", "0"]
    command += ["--batch-size", str(options.batch_size), "--mode", options.mode]
    command += ["--temperature", "0.7"]  # the program that samples, as offline
    if "model" in options:
        command += ["--model", options.model]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("WEDLM_")}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r":(\d+)/v1$", line.strip())
        if found is None:
            raise InputError(f"the server did not start: {line.strip()!r}")
        yield process.pid, int(found[1])
    finally:
        process.terminate()
        process.wait(60)


def load_of(
    clients: int,
    heard: Sequence[Heard],
    seconds: float,
    offline: tuple[float, float],
    client_share: float,
) -> dict[str, Any]:
    """Returns the table row of this many clients at a time.

    Args:
      offline: tokens per second of a job, and of one that decodes at most as many sequences at a
        time as there are clients.
      client_share: the client's share of the CPU seconds of both processes.
    """
    if errors := [one.error for one in heard if one.error is not None]:
        raise InputError(f"{len(errors)} calls failed; the first: {errors[0]}")
    speed = sum(len(one.token_ids) for one in heard) / seconds
    times = {FIRST: [one.first for one in heard], BETWEEN: [g for one in heard for g in one.gaps]}
    return {
        "clients": clients,
        "requests": len(heard),
        "tokens/s": speed,
        "of the job's": speed / offline[0],
        "of one as wide": speed / offline[1],
        "client's CPU": client_share,
        **{
            f"{what}, {name}": 1e3 * float(np.quantile(values or [0.0], share))
            for what, values in times.items()
            for name, share in QUANTILES.items()
        },
    }


def _cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds that a process has used; Linux only."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def draw_loads(loads: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draws the times against the number of clients: medians and 95th percentiles."""
    figure = new_figure(10, 4)
    clients = [load["clients"] for load in loads]
    for axes, what in zip(figure.subplots(1, 2), (FIRST, BETWEEN), strict=True):
        for name, line in zip(QUANTILES, ("-o", "--o"), strict=True):
            axes.plot(clients, [load[f"{what}, {name}"] for load in loads], line, label=name)
        axes.set(xscale="log", yscale="log", xlabel="clients at a time", ylabel=f"ms {what}")
        axes.set_xticks(clients, [str(one) for one in clients])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(run_command("python -m benchmarks.serve_load", lambda: main(sys.argv[1:])))
