"""Traces as `wedlm generate --trace` writes them, and what is refused of them and drawn."""

import json

import pytest

from infer.plots import EARLY, FILLED, REJECTED
from infer.trace import SequenceTrace, read_trace, write_trace
from wedlm_jax.__main__ import main
from wedlm_jax.engine.interface import Request, Traced, WindowForward
from wedlm_jax.errors import BAD_INPUT
from wedlm_jax.params import SamplingParams

PROMPT, LENGTH = 5, 12
"""Tokens of a prompt, and of the answer below."""


def generate(checkpoint, *arguments):
    shape = ["--window-size", "4", "--max-tokens", str(LENGTH), "--deterministic"]
    return main(["generate", "--model", str(checkpoint), *shape, *arguments])


def forward(start, held, drafted, *, rejected=(), committed=()):
    entropies = [None if token else 0.51239 for token in [*held, 1]]
    seen = WindowForward(start, held, entropies, drafted, [*rejected], 0.25, 100.25 + start)
    return Traced(Request(0, (), SamplingParams()), seen, [*committed], 1, len(held))


@pytest.fixture(scope="module")
def written(checkpoint, tmp_path_factory):
    path = tmp_path_factory.mktemp("trace") / "out.json"
    assert generate(checkpoint, "--prompt", "the cat", "--trace", str(path)) == 0
    return path


@pytest.mark.full
def test_generate_writes_the_trace_of_what_it_prints(checkpoint, written, capsys):
    (trace,) = read_trace(written)
    assert generate(checkpoint, "--prompt", "the cat") == 0
    assert "".join(one["text"] for one in trace["forwards"]) == capsys.readouterr().out[:-1]
    known = {"prompt": "the cat", "model": checkpoint.name, "finish_reason": "length"}
    assert trace.items() >= (known | {"mode": "verified", "window_size": 4}).items()
    assert sum(len(one["committed"]) for one in trace["forwards"]) == LENGTH
    seconds = [one["seconds"] for one in trace["forwards"]]
    assert 0 < seconds[0] <= seconds[-1] == max(seconds)
    assert trace["forwards"][0]["start"] == -1
    ids = {str(token) for one in trace["forwards"] for token in [*one["slots"], *one["committed"]]}
    assert ids - {"None"} <= trace["tokens"].keys()


def test_out_of_order_is_behind_a_mask_that_stays():
    trace = SequenceTrace(None, SamplingParams(mode="paper"), PROMPT, 4)
    held = [7, None, None, None, None]
    trace.take(forward(PROMPT, held, [None, 8, None, 9, None]))
    trace.take(forward(PROMPT, held, [None, 8, 9, None, None]))
    first, second = trace.whole(None)["forwards"]
    assert first == {
        "seconds": 0.25,
        "start": 0,
        "slots": held,
        "entropies": [None, *[0.5124] * 4, None],
        "filled": [(1, 8), (3, 9)],
        "out_of_order": [3],
        "rejected": [],
        "committed": [],
        "text": None,
        "num_forwards": 1,
        "num_token_instances": 5,
    }
    assert (second["filled"], second["out_of_order"]) == ([(1, 8), (2, 9)], [])


# --- refusals ----------------------------------------------------------------------------


def changed(whole, path, value):
    """Sets the value at a path, or deletes it for ``...``."""
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return whole


FORWARD = ("sequences", 0, "forwards", 0)


DAMAGE = [
    (("format",), "x", 'expected an object with "format": "wedlm-trace"'),
    (("version",), 2, "version 2; expected 1"),
    *(
        (path, value, "this trace is damaged")
        for path, value in [
            (("sequences",), ...),
            (("sequences",), []),
            (("sequences",), 3),
            (("sequences", 0), 3),
            (("sequences", 0, "mode"), ...),
            (("sequences", 0, "forwards"), []),
            (("sequences", 0, "forwards"), {"0": {}}),
            ((*FORWARD, "start"), "0"),
            ((*FORWARD, "start"), 0.5),
            ((*FORWARD, "start"), 10**9),
            ((*FORWARD, "start"), 10**30),
            ((*FORWARD, "slots"), None),
            ((*FORWARD, "entropies"), [None, "high"]),
            ((*FORWARD, "filled"), [[1]]),
            ((*FORWARD, "committed"), 5),
            ((*FORWARD[:3], 1, "rejected"), ...),
        ]
    ),
]


def test_a_damaged_file_is_refused(written, tmp_path, capsys):
    bad = tmp_path / "bad.json"
    damaged = [
        (json.dumps(changed(json.loads(written.read_bytes()), path, value)).encode(), sentence)
        for path, value, sentence in DAMAGE
    ]
    contents = (b"", b"\x00\xff", b"[1, 2", b"null", b"[]", b"[" * 100_000)
    for content, sentence in (*damaged, *((one, "expected") for one in contents)):
        bad.write_bytes(content)
        assert main(["plot", str(bad)]) == BAD_INPUT
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"wedlm plot: {bad}: ")
        assert sentence in line
    assert not bad.with_suffix(".svg").exists()


# --- the drawing -------------------------------------------------------------------------


def test_plot_draws_what_happened(tmp_path, capsys):
    verified = SequenceTrace(None, SamplingParams(), PROMPT, 2)
    verified.take(forward(PROMPT - 1, [3, None, None], [None, None, 8], committed=[7]))
    verified.take(forward(PROMPT, [7, 8, None, None], [None] * 4, rejected=[1], committed=[9]))
    paper = SequenceTrace(None, SamplingParams(mode="paper"), PROMPT, 3)
    paper.take(forward(PROMPT, [None] * 3, [8, None, 9]))
    file = tmp_path / "two.json"
    write_trace(file, [verified.whole("length"), paper.whole("length")])
    assert main(["plot", str(file)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'two.svg'}\n"
    drawing = (tmp_path / "two.svg").read_text(encoding="utf-8")
    assert "verified: 2 tokens in 1 forward" in drawing
    assert "paper: 0 tokens in 1 forward" in drawing
    # An outline each, and one in the legend: filled in order, out of order, rejected.
    strokes = [drawing.count(f"stroke: {colour}") for colour in (FILLED, EARLY, REJECTED)]
    assert strokes == [2 + 1, 1 + 1, 1 + 1]
