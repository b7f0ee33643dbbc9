"""`wedlm evaluate`: accuracy and speed on questions, or on tasks of lm-evaluation-harness.

On questions, decoders with the same weights are compared in the same process. Each decoder first
answers all questions untimed, which compiles what it needs. Then the decoders take turns, a few
batches at a time, so that a busy machine slows them alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import wedlm_jax
from infer.flags import LLM_OPTIONS, add_engine_options, adders, advised_params, flag
from infer.generate import load
from infer.plots import check_plot
from infer.score import Score, draw_scores, legend, score_table
from wedlm_jax.errors import InputError
from wedlm_jax.host.atomic import check_writable, write_json, written_beside
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.records.questions import MATCHES, read_questions, tally

if TYPE_CHECKING:
    from rich.console import Console

    from wedlm_jax.completion import Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.records.questions import Question

KINDS = ("ar", "paper", "verified")
"""Kinds of decoders, in the order in which they are compared."""

MOST = 1_000_000
"""The largest valid value of options that count something, so that a slip is noticed early."""

QUESTION_OPTIONS: dict[str, Any] = {
    "questions": None,
    "match": "exact",
    "chat": False,
    "samples": None,
    "decoders": KINDS,
    "passes": 3,
    "answers": None,
    "plot": None,
}
"""Options that apply only to questions, with their defaults."""

TASK_OPTIONS: dict[str, Any] = {
    "mode": "verified",
    "limit": None,
    "num_fewshot": None,
    "apply_chat_template": False,
    "include_path": (),
    "log_samples": False,
    "run_code": False,
}
"""Options that apply only to tasks, with their defaults."""


EMBEDDED_QUESTIONS = Path(wedlm_jax.__file__).parent / "embedded" / "heldout.jsonl"

MAX_TOKENS = 160
"""Default for the included model's questions; longer than any answer in its corpus."""
OWN_MAX_TOKENS = 512
"""Default for questions in a user's file."""

BATCHES_PER_TURN = 16
"""How many batches of questions a decoder answers before the next takes its turn: a second or two
with a small model."""
SLOWER = 0.97
"""The speed relative to AR below which a message says that the default mode is slower."""

SAMPLES = 300
"""Questions per regime that the included model is asked by default."""

PAPER_THRESHOLDS = (0.2, 0.4, 0.6, 0.9)

DECODER_OPTIONS = (
    *(name for name in LLM_OPTIONS if name != "model"),
    "position_penalty",
    "max_tokens",
)
"""Options that `decoders_at` takes under the same name."""


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A way to decode: its name, the model that decodes, and the sampling parameters."""

    name: str
    llm: LLM
    params: SamplingParams


def evaluate_all(
    decoders: Sequence[Decoder],
    regimes: Sequence[Sequence[Question]],
    *,
    passes: int,
    console: Console | None = None,
    on_answers: Callable[[Sequence[Question], str, list[Completion]], None] = lambda *_: None,
) -> list[Score]:
    """Scores decoders on the questions of one regime after another, with a progress bar.

    Args:
      passes: number of timed passes of each decoder over all questions.
      console: where the bar is shown; by default standard error.
      on_answers: called with the questions, a decoder's name, and its completions.
    """
    from wedlm_jax.host.progress import ProgressBar

    total = sum(map(len, regimes)) * len(decoders) * (passes + 1)
    scores, answered, spent = list[Score](), 0, 0.0
    with ProgressBar("answers", total=total, console=console) as bar:

        def run(decoder: Decoder, questions: Sequence[Question]) -> tuple[list[Completion], float]:
            """Returns the completions and the seconds that they took, without compiling."""
            nonlocal answered, spent
            bar.update(
                answered,
                title=f"{questions[0].regime.replace('_', ' ')} · {decoder.name:<16}",
                seconds_left=spent * (total / answered - 1) if answered else math.inf,
            )
            llm = decoder.llm
            clock = llm.engine.clock()
            prompts = _prompts(llm, questions)
            completions = llm.generate(prompts, [_with_room(decoder, one) for one in prompts])
            seconds = clock.seconds
            answered, spent = answered + len(questions), spent + seconds
            return completions, seconds

        for questions in regimes:
            answers = []
            for decoder in decoders:
                answers.append(run(decoder, questions)[0])
                on_answers(questions, decoder.name, answers[-1])
            batch = max(decoder.llm.options.max_batch_size for decoder in decoders)
            turn = BATCHES_PER_TURN * batch
            parts = [questions[at : at + turn] for at in range(0, len(questions), turn)]
            seconds = np.zeros((len(decoders), passes))
            for i, part in itertools.product(range(passes), parts):
                seconds[:, i] += [run(decoder, part)[1] for decoder in decoders]
            scores += [
                _score(decoder, questions, answers[i], answers[0], seconds[i].tolist())
                for i, decoder in enumerate(decoders)
            ]
        bar.update(total)
    return scores


def _with_room(decoder: Decoder, prompt: Sequence[int]) -> SamplingParams:
    """Returns the decoder's parameters, with max_tokens reduced to what the context leaves for an
    answer; unchanged if it leaves nothing, so that the prompt is refused."""
    from wedlm_jax.engine.interface import Request

    params = decoder.params
    room = decoder.llm.engine.most_tokens(Request(-1, prompt, params))
    if room < 1:
        return params
    return dataclasses.replace(params, max_tokens=min(params.max_tokens, room))


def _prompts(llm: LLM, questions: Iterable[Question]) -> list[list[int]]:
    if llm.codec is None:
        raise InputError(f"{llm.name} has no tokenizer, which questions need")
    return [question.encode(llm.codec) for question in questions]


def check_fits(decoder: Decoder, question: Question) -> None:
    """Refuses a question that the model cannot decode."""
    llm = decoder.llm
    with question.named():
        prompt = llm.as_ids(
            question.prompt if question.messages is None else llm.chat_prompt(question.messages)
        )
        llm.prepare_one(prompt, _with_room(decoder, prompt))


def _score(
    decoder: Decoder,
    questions: Sequence[Question],
    completions: Sequence[Completion],
    first: Sequence[Completion],
    seconds: list[float],
) -> Score:
    """Scores completions; ``first`` are those of the first decoder."""
    counted = tally(questions, completions)
    alike = sum(a.token_ids == b.token_ids for a, b in zip(completions, first, strict=True))
    return Score(
        decoder=decoder.name,
        regime=questions[0].regime,
        as_first=alike / counted.questions,
        ar_agrees=ar_agrees(decoder.llm, questions, completions),
        seconds=seconds,
        **dataclasses.asdict(counted),
    )


def ar_agrees(llm: LLM, questions: Sequence[Question], completions: Sequence[Completion]) -> float:
    """Returns the share of tokens that AR finds most probable, given all tokens before them."""
    places = llm.score(_prompts(llm, questions), [one.token_ids for one in completions], top=1)
    best = [
        place.top[0][0] == token
        for one, scored in zip(completions, places, strict=True)
        for token, place in zip(one.token_ids, scored, strict=True)
    ]
    return sum(best) / len(best)


def decoders_at(
    model: str | None,
    thresholds: Sequence[float],
    *,
    window_size: int | None = 16,
    position_penalty: float = 0.02,
    batch_size: int = 1,
    max_tokens: int = MAX_TOKENS,
    kinds: Sequence[str] = KINDS,
    **others: Any,
) -> list[Decoder]:
    """Returns decoders for AR, for mode paper at each threshold, and for mode verified.

    Args:
      window_size: W; None for the engine's default.
      kinds: which of these to return. A model that was not trained on masks has no mode paper.
      others: more options of `infer.generate.load`.
    """
    from wedlm_jax.checkpoint.open import find_model, open_checkpoint

    others |= {"batch_size": batch_size} | ({} if model is None else {"model": model})

    def loaded(**more: Any) -> LLM:
        return load(others | more)

    base = dataclasses.replace(
        advised_params(others),
        mode="paper",
        max_tokens=max_tokens,
        position_penalty=position_penalty,
    )
    at = [dataclasses.replace(base, entropy_threshold=x) for x in thresholds]
    decoders: list[Decoder] = []
    folder = find_model(model)
    drafter = others.get("drafter") is not None
    masks = drafter or open_checkpoint(folder).config.knows_masks
    if (drafter or not masks) and "paper" in kinds:
        kinds = [kind for kind in kinds if kind != "paper"]
        why = f"{model or folder} was not trained on masks"
        if drafter:
            why = "a drafter's masks only propose tokens"
        if not kinds:
            raise InputError(f"--decoders: mode paper needs masks, but {why}")
        print(f"{why}: mode paper is left out", file=sys.stderr)
    if {"paper", "verified"} & set(kinds):  # first, since the window may not fit the model
        llm = loaded(window_size=window_size if masks else None)
    if "ar" in kinds:
        decoders.append(Decoder("AR", loaded(window_size=0), dataclasses.replace(base, mode="ar")))
    if "paper" in kinds:
        decoders += [Decoder(f"paper τ={p.entropy_threshold:g}", llm, p) for p in at]
    if "verified" in kinds:
        decoders.append(Decoder("verified", llm, dataclasses.replace(base, mode="verified")))
    return decoders


def _compare(options: Mapping[str, Any], regimes: Sequence[Sequence[Question]]) -> None:
    """Compares decoders according to ``options``; prints and writes the results."""
    from rich.console import Console

    names = {name: options[name] for name in DECODER_OPTIONS if name in options}
    decoders = decoders_at(
        options.get("model"),
        options.get("entropy_threshold", PAPER_THRESHOLDS),
        kinds=options["decoders"],
        **names,
    )
    for decoder in decoders:
        for question in itertools.chain.from_iterable(regimes):
            check_fits(decoder, question)
    answers: list[dict[str, object]] = []

    def note(asked: Sequence[Question], name: str, said: Sequence[Completion]) -> None:
        answers.extend(as_answer(name, *pair) for pair in zip(asked, said, strict=True))

    scores = evaluate_all(decoders, regimes, passes=options["passes"], on_answers=note)
    console = Console()
    console.print(score_table(scores))
    console.print()
    console.print(legend(scores))
    _tell_cut(scores, options["max_tokens"])
    _tell_slower(scores)
    if options["output"] is not None:
        write_json(Path(options["output"]), [score.as_row() for score in scores])
    if options["answers"] is not None:
        with written_beside(Path(options["answers"])) as file:
            for answer in answers:
                file.write(json.dumps(answer, ensure_ascii=False).encode("utf-8") + b"\n")
    if options["plot"] is not None:
        draw_scores(scores, Path(options["plot"]))


def as_answer(decoder: str, question: Question, completion: Completion) -> dict[str, object]:
    """Returns one line of the ``--answers`` file."""
    return {
        "decoder": decoder,
        "regime": question.regime,
        "prompt": question.prompt,
        "answer": question.answer,
        "match": question.match,
        "text": completion.text,
        "right": question.is_right(completion.text or ""),
        "finish_reason": completion.finish_reason,
        "num_tokens": len(completion.token_ids),
        "num_forwards": completion.num_forwards,
    }


def _tell_slower(scores: Sequence[Score]) -> None:
    """Warns if the default mode took longer than AR, and says what to do about it."""
    of_ar = {score.regime: score for score in scores if score.decoder == "AR"}
    slower = [
        f"{speed:.2f}x in {score.regime.replace('_', ' ')}"
        for score in scores
        if score.decoder == "verified"
        and score.regime in of_ar
        and (speed := score.speed_up(of_ar[score.regime])) < SLOWER
    ]
    if slower:
        print(
            f"on this machine mode verified is slower than AR: {', '.join(slower)}; --mode ar or "
            "--window-size 0 (in Python LLM(window_size=0)) gives the same tokens faster there",
            file=sys.stderr,
        )


def _tell_cut(scores: Sequence[Score], max_tokens: int) -> None:
    cut, total = sum(score.cut for score in scores), sum(score.questions for score in scores)
    if cut:
        print(
            f"{cut} of {total} answers were cut at {max_tokens} tokens; --max-tokens N allows more",
            file=sys.stderr,
        )


# --- the command ----------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Returns the parser. An option that is not given is absent from the result."""
    result = CommandParser(
        prog="wedlm evaluate",
        usage="wedlm evaluate [--model DIR] [--questions FILE | --tasks NAME ...] [options]",
        description="Measures accuracy and speed of AR decoding, mode paper and verified decoding "
        "with the same weights,\non questions held out from the included model's training or on "
        "your own; or scores a model on\ntasks of lm-evaluation-harness.",
        epilog="docs/evaluation.md describes the format of questions, and how to run HumanEval.\n\n"
        "examples:\n"
        "  wedlm evaluate --samples 100 --entropy-threshold 0.4 --plot scores.svg\n"
        "  wedlm evaluate --model DIR --questions questions.jsonl --decoders ar verified\n"
        "  wedlm evaluate --model DIR --tasks gsm8k --limit 200 --batch-size 64",
        argument_default=argparse.SUPPRESS,
    )
    add_engine_options(result.add_argument_group("model"), batch_size="1; tasks 16")
    add, _ = adders(result.add_argument_group("decoding"))
    add("--window-size", "N", "W, the number of masks that draft in parallel [16]")
    add(
        "--entropy-threshold",
        "X",
        "τ of mode paper in nats; for questions one or more [0.2 0.4 0.6 0.9; tasks 0.4]",
        nargs="+",
    )
    add("--position-penalty", "X", "λ of mode paper [0.02]")
    add(
        "--max-tokens",
        "N",
        "maximum tokens of an answer [160; own questions 512; tasks: each sets its own]",
    )
    add("--output", "FILE", "also write the scores as JSON")
    add, switch = adders(result.add_argument_group("questions"))
    add("--questions", "FILE", "JSONL questions [those of the included model]")
    add(
        "--match",
        None,
        "how to judge answers if the question does not say [exact]",
        choices=MATCHES,
    )
    switch("--chat", "treat each prompt as a user message and apply the chat template")
    add("--samples", "N", "number of questions per regime [300; own questions: all]")
    add(
        "--decoders",
        "NAME",
        f"decoders to compare: {', '.join(KINDS)} [all that the model can run]",
        nargs="+",
        choices=KINDS,
    )
    add("--passes", "N", "number of timed passes [3]")
    add("--answers", "FILE", "also write each answer and its verdict as JSONL")
    add("--plot", "FILE", "also draw the scores (.svg, .png or .pdf; needs the extra plot)")
    add, switch = adders(result.add_argument_group("tasks; these need wedlm-jax[eval]"))
    add("--tasks", "NAME", "names or YAML files of tasks", nargs="+")
    add("--mode", None, "how answers are decoded [verified]", choices=("verified", "paper", "ar"))
    add("--limit", "N", "number of documents per task [all]")
    add("--num-fewshot", "N", "solved examples before each question [each task sets its own]")
    switch("--apply-chat-template", "apply the chat template [off]")
    add("--include-path", "DIR", "folders with your own tasks [none]", nargs="+")
    switch("--log-samples", "with --output: also write every answer to it [off]")
    switch("--run-code", "run programs that the model wrote, as human_eval needs for scoring [off]")
    return result


def check(given: Mapping[str, Any]) -> None:
    """Refuses options that contradict one another before anything is loaded."""
    tasks = "tasks" in given
    if others := (QUESTION_OPTIONS if tasks else TASK_OPTIONS).keys() & given.keys():
        how = "cannot be combined with" if tasks else "goes with"
        raise InputError(f"{flag(min(others))} {how} --tasks")
    for name in ("samples", "passes", "limit", "max_tokens"):
        if not 1 <= given.get(name, 1) <= MOST:
            raise InputError(f"{flag(name)}: expected 1 to {MOST:,}, not {given[name]:,}")
    for name in ("output", "answers"):
        if name in given:
            check_writable(Path(given[name]), f"--{name}")
    if "plot" in given:
        check_plot(given["plot"])


def main(arguments: list[str]) -> int:
    given = vars(parser().parse_args(arguments))
    check(given)
    options = QUESTION_OPTIONS | TASK_OPTIONS | {"output": None} | given
    if "tasks" in given:
        from infer.harness.command import run_tasks

        return run_tasks(options)
    is_users = options["questions"] is not None
    regimes = read_questions(
        Path(options["questions"] if is_users else EMBEDDED_QUESTIONS),
        match=options["match"],
        chat=options["chat"],
    )
    options.setdefault("max_tokens", OWN_MAX_TOKENS if is_users else MAX_TOKENS)
    samples = options["samples"] or (None if is_users else SAMPLES)
    chosen = [questions[:samples] for questions in regimes.values()]
    _compare(options, chosen)
    return 0
