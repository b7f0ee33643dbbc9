"""`wedlm demo`: shows the included model decode, slot by slot, then measures it."""

from __future__ import annotations

import dataclasses
import io
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rich.text import Text

from infer.flags import adders
from wedlm_jax.errors import InputError, counted
from wedlm_jax.host.command_line import CommandParser

if TYPE_CHECKING:
    from rich.console import Console

    from infer.evaluate import Decoder
    from wedlm_jax.engine.interface import Traced
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.records.questions import Question
    from wedlm_jax.text import TextCodec

PROMPTS_A_REGIME = 4
LONGEST_PAUSE = 0.6
"""Maximum seconds for which a forward is shown."""
PASSES = 5
PICTURE_WIDTH = 100
"""Columns of the picture that `--record` draws."""

MASK = "░"
TAIL = 40
"""Characters of committed text, the last ones, that a plain line shows to stay one line."""

FILLED_STYLE = "#101010 on #8fbf6f"
MASK_STYLE = "bright_black"
LEGEND = Text.assemble(
    "committed  ", (" filled ", FILLED_STYLE), "  ", (MASK + " masked", MASK_STYLE)
)


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm demo",
        description="Decodes held-out prompts of three kinds with the included model, shows the\n"
        "window of masks as it fills, and measures WeDLM against autoregressive (AR)\n"
        "decoding with the same weights in the same engine.",
    )
    add, _ = adders(parser)
    pace = "seconds over which a prompt's forwards are shown, in a terminal [3]"
    add("--seconds", "X", pace, default=3.0)
    count = "number of questions of each kind to measure at the end [40], at least "
    add("--samples", "N", f"{count}{PROMPTS_A_REGIME}", default=40)
    picture = "only draw a picture: a prompt of each of two kinds, forward by forward"
    add("--record", "FILE.svg", picture)
    options = parser.parse_args(arguments)
    if options.samples < PROMPTS_A_REGIME:
        raise InputError(f"--samples: expected at least {PROMPTS_A_REGIME}, not {options.samples}")
    if not 0 <= options.seconds <= 60:
        raise InputError(f"--seconds: expected 0 to 60, not {options.seconds:g}")
    picture = options.record
    if picture and not (picture.endswith(".svg") and Path(picture).resolve().parent.is_dir()):
        raise InputError(f"--record {picture}: expected an .svg file in a folder that exists")

    from rich.console import Console

    # In a terminal, lines are wrapped at its width; in a file they are not.
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty())
    console.print("Loading the included model ...")
    from infer.evaluate import EMBEDDED_QUESTIONS, decoders_at
    from wedlm_jax.records.questions import read_questions

    decoders = decoders_at(None, [0.4], window_size=None, kinds=("ar", "paper", "verified"))
    regimes = [
        questions[: options.samples] for questions in read_questions(EMBEDDED_QUESTIONS).values()
    ]
    wedlm = decoders[-1]  # the default
    if picture:
        _draw(Path(picture), wedlm, [questions[0] for questions in regimes[:2]])
        console.print(f"wrote {picture}")
        return 0
    _introduce(console, wedlm)
    for questions in regimes:
        console.rule(f"[bold]{questions[0].regime.replace('_', ' ')}")
        for number, question in enumerate(questions[:PROMPTS_A_REGIME]):
            _show(console, wedlm, question, options.seconds, trace=number == 0)
    _measure(console, decoders, regimes)
    return 0


def _introduce(console: Console, decoder: Decoder) -> None:
    import jax

    from infer.evaluate import MAX_TOKENS

    engine = decoder.llm.engine
    config, device = engine.config, jax.devices()[0]
    console.print(
        f"{engine.num_parameters / 1e6:.1f}M parameters, {config.num_hidden_layers} layers, "
        f"vocabulary {config.vocab_size}; mode {decoder.params.mode}; on {device.platform}. First "
        f"some answers with windows of {engine.settings.window} masks, then speeds with windows "
        "chosen by speed. Compiling ..."
    )
    # Compiles now, so that what follows shows only decoding.
    _views(decoder.llm, [0], dataclasses.replace(decoder.params, max_tokens=1))
    console.print(f"compiled in {engine.compile_seconds:.1f} s; at most {MAX_TOKENS} tokens each")
    if console.is_terminal:
        console.print(LEGEND)


class View(NamedTuple):
    """What a forward of a prompt saw, or at the end the answer.

    Attributes:
      token_ids: tokens committed before the forward.
      window: the slots after these tokens; None for a mask.
      num_forwards: decode forwards, this one included.
    """

    token_ids: list[int]
    window: list[int | None]
    num_forwards: int


def _show(
    console: Console, decoder: Decoder, question: Question, seconds: float, *, trace: bool
) -> None:
    """Shows one prompt. In a terminal its forwards replace one another; elsewhere the answer is
    printed, after one line per forward if ``trace``."""
    codec = decoder.llm.codec
    assert codec is not None
    console.print(f"\n> {question.prompt}", style="bold", markup=False)
    *forwards, last = _views(decoder.llm, question.encode(codec), decoder.params)
    if console.is_terminal:
        from rich.live import Live

        # Decoding takes milliseconds, so its forwards are shown afterwards, slowed down.
        pause = min(LONGEST_PAUSE, seconds / max(last.num_forwards, 1))
        with Live(console=console, auto_refresh=False) as live:
            for view in forwards:
                live.update(styled(codec, view.token_ids, view.window), refresh=True)
                time.sleep(pause)
            live.update(styled(codec, last.token_ids), refresh=True)
    else:
        for view in forwards if trace else ():
            console.print(f"  {plain(codec, view.token_ids, view.window)}", markup=False)
        console.print(codec.complete_text(last.token_ids), markup=False)
    text = codec.complete_text(last.token_ids)
    console.print(f"  {_result(question, last, text)}", style="dim", markup=False)


def _result(question: Question, last: View, text: str) -> str:
    """Returns a line with the answer's tokens and forwards, and whether it is right."""
    tokens, forwards = len(last.token_ids), last.num_forwards
    took = f"{counted(tokens, 'token')} in {counted(forwards, 'forward')} (AR: {tokens})"
    verdicts = {True: "; right answer", False: f"; wrong: expected {question.expected!r}", None: ""}
    return took + verdicts[question.is_right(text)]


def _views(llm: LLM, prompt: list[int], params: SamplingParams) -> list[View]:
    """Decodes a prompt with the widest windows; returns what each forward saw, then the answer."""
    views = [View([], [], 0)]  # the last view always holds the text so far

    def take(event: Traced) -> None:
        text = views.pop().token_ids
        # In mode verified slot 0 holds the last token of the text.
        known = len(prompt) + len(text) - event.forward.start
        views.append(View(text, event.forward.held[known:], event.num_forwards))
        views.append(View(text + event.committed, [], event.num_forwards))

    # A fixed window: windows chosen by speed may be none, and would depend on the machine, while
    # the same answers must give the same picture.
    for _ in llm.stream(prompt, params, window=llm.engine.settings.window, on_forward=take):
        pass
    return views


def _draw(file: Path, decoder: Decoder, questions: Sequence[Question]) -> None:
    """Draws the forwards of the questions' prompts, one below another, as an SVG picture."""
    from rich.console import Console
    from rich.table import Table

    from wedlm_jax.host.atomic import written_beside

    codec = decoder.llm.codec
    assert codec is not None
    console = Console(
        record=True,
        file=io.StringIO(),
        width=PICTURE_WIDTH,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(LEGEND)
    for question in questions:
        console.print(f"\n> {question.prompt}", style="bold", markup=False)
        *forwards, last = _views(decoder.llm, question.encode(codec), decoder.params)
        table = Table.grid(padding=(0, 2))
        for view in forwards:
            shown = styled(codec, view.token_ids, view.window)
            table.add_row(f"[dim]forward {view.num_forwards}[/]", shown)
        table.add_row("[dim]answer[/]", styled(codec, last.token_ids))
        console.print(table)
        text = codec.complete_text(last.token_ids)
        console.print(f"{'':11}{_result(question, last, text)}", style="dim", markup=False)
    # A fixed id: the same answers give the same file.
    picture = console.export_svg(title="wedlm demo", unique_id="wedlm-demo")
    # A page with the picture must load nothing from other hosts, so it uses a local monospace font.
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)
    with written_beside(file) as opened:
        opened.write(picture.encode("utf-8"))


def _measure(console: Console, decoders: list[Decoder], regimes: list[list[Question]]) -> None:
    from infer.evaluate import evaluate_all
    from infer.score import legend, score_table

    console.rule("[bold]measured")
    console.print(
        f"{sum(map(len, regimes))} questions, {len(decoders)} decoders, {PASSES + 1} rounds; "
        "the first compiles and is not timed:"
    )
    scores = evaluate_all(decoders, regimes, passes=PASSES, console=console)
    console.print(score_table(scores))
    engines = {id(decoder.llm): decoder.llm.engine for decoder in decoders}
    compiling = sum(engine.compile_seconds for engine in engines.values())
    console.print()
    console.print(legend(scores))
    console.print(
        f"\n{len(regimes[0])} held-out questions of each kind, one at a time; the decoders take "
        f"turns. Times include the prompt but not compiling ({compiling:.0f} s in all). Mode paper "
        "commits what masks were filled with; mode verified commits only what AR would choose."
    )


# --- a sequence as text: committed tokens, filled slots, masks -------------------------------


def styled(codec: TextCodec, committed: Sequence[int], window: Sequence[int | None] = ()) -> Text:
    """Returns committed text as it is, then filled slots on a coloured background and masks as
    shaded cells."""
    text = Text(codec.complete_text(list(committed)))
    for token in window:
        if token is None:
            text.append(MASK, MASK_STYLE)
        else:
            text.append(_visible(codec, token), FILLED_STYLE)
    return text


def plain(codec: TextCodec, committed: Sequence[int], window: Sequence[int | None]) -> str:
    """Returns a forward as one line of plain text: the end of the committed text, then the window,
    with filled slots in brackets and masks as underscores."""
    slots = ("_" if token is None else f"[{_visible(codec, token).strip(' ')}]" for token in window)
    text = _one_line(codec.complete_text(list(committed)))
    tail = text if len(text) <= TAIL else "…" + text[1 - TAIL :]
    return f"{tail}|{''.join(slots)}"


def _visible(codec: TextCodec, token: int) -> str:
    return _one_line(codec.decode([token])) or "·"


def _one_line(text: str) -> str:
    return text.replace("\n", "⏎")
