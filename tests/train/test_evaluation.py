"""Evaluation in mid-run: the same rows, masks and questions every time."""

import dataclasses
import json
import math
import os
import signal
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.examples.data import EMBEDDED, tokenised, write_jsonl
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from train.data.shards import ShardRows, read_manifest
from train.evaluation import Evaluation, asked_questions, can_decode, drawn_questions, prompts_of
from train.loop import RunStopped
from train.loop import train as run_training
from train.program import make_program
from train.recipe.config import EvaluationSection, OptimizerSection
from train.start import held_out_rows, recipe_model
from wedlm_jax.completion import Completion
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import CompilingInterrupted, InputError
from wedlm_jax.llm import LLM
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import make_mesh, tree_shardings
from wedlm_jax.text import TextCodec

ASKED = ("two red boxes", "7 + 5 =", "Count: 1, 2,")


def write_questions(path, said):
    """What was said as answers, and a question whose answer nobody gives."""
    rows = [
        {"prompt": prompt, "answer": one.text, "match": "contains"}
        for prompt, one in zip(ASKED, said, strict=False)
    ]
    rows.append({"prompt": ASKED[0], "answer": "nobody says this", "match": "contains"})
    return write_jsonl(path, rows)


def test_a_run_evaluates_on_its_way_and_trains_as_without(
    finished, tokenizer_folder, tmp_path, monkeypatch
):
    """Also when Ctrl-C comes in mid-evaluation: the run stops between two bursts, and saves the
    state of a step that was due for none."""
    # What the model says when it is trained: the last evaluation must find it right.
    llm = LLM(finished / "hf", dtype="float32")
    answers = llm.generate(list(ASKED), SamplingParams(max_tokens=12))
    section = EvaluationSection(
        every=2,
        rows=4,
        prompts=2,
        max_tokens=6,
        questions=str(write_questions(tmp_path / "questions.jsonl", answers)),
        answer_tokens=12,
    )
    config = tiny_recipe(tmp_path, tokenizer_folder, evaluation=section)
    told, run, step, interrupted = [], Evaluation.run, Engine.step, []

    def told_run(self, parameters, at):
        return run(self, parameters, lambda text: (told.append(text), at(text)))

    def step_with_ctrl_c(*arguments, **named):
        if not interrupted and len(metric_lines(tmp_path)) == 2:
            interrupted.append(len(told))
            os.kill(os.getpid(), signal.SIGINT)
        return step(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", told_run)
        patch.setattr(Engine, "step", step_with_ctrl_c)
        with pytest.raises(RunStopped, match="stopped after step 2"):
            run_training(config)
    assert len(told) == interrupted[0] + 1, "the next look at the request is the last"
    assert states(tmp_path) == ["2"]
    assert told[:2] == ["compiling the losses on held-out rows", "losses on held-out rows"]
    assert "2 of 2 prompts decoded" in told
    run_training(config)
    assert metric_lines(tmp_path) == metric_lines(finished)
    lines = evaluations(tmp_path)
    assert [line["step"] for line in lines] == [0, 2, 4]
    for line in lines:
        assert line["ar_perplexity"] == pytest.approx(math.exp(line["ar_loss"]))
        assert line["loss"] == pytest.approx((line["mlm_loss"] + line["ar_loss"]) / 2)
        # A window never commits more than half of the slots that it runs.
        assert 0 < line["p_cache"] <= 0.5
        assert 0 < line["tokens_per_forward"] <= 16
        assert any(name.startswith("mlm_loss_ratio_") for name in line)
        assert line["questions"] == len(ASKED) + 1
    assert lines[2]["ar_loss"] < lines[1]["ar_loss"] < lines[0]["ar_loss"]
    assert lines[2]["question_accuracy"] == len(ASKED) / (len(ASKED) + 1)
    cut = [one.finish_reason == "length" for one in answers]
    assert lines[2]["questions_cut"] == sum(cut) + cut[0]  # the first prompt is asked twice


class Failed(Exception):
    pass


def dies_at(monkeypatch, config, number, failure=Failed):
    """Runs until evaluation ``number``, from 0, fails; returns those in the log."""
    made, real = 0, Evaluation.run

    def run(*arguments):
        nonlocal made
        made += 1
        if made > number:
            raise failure
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Evaluation, "run", run)
        with pytest.raises(failure):
            run_training(config)
    return evaluations(Path(config.output))


def evaluations(output):
    path = output / "evaluation.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def states(output):
    return sorted(path.name for path in (output / "checkpoints").glob("[0-9]*"))


@pytest.mark.full
@pytest.mark.parametrize(
    ("checkpoint_every", "failure"), [(100, Failed), (2, Failed), (100, CompilingInterrupted)]
)
def test_an_evaluation_that_fails_loses_no_steps_and_is_made_when_the_run_goes_on(
    finished, tokenizer_folder, tmp_path, monkeypatch, capsys, checkpoint_every, failure
):
    """In the midst of the run and after its last step; at a step with a state, and at another."""
    section = EvaluationSection(every=2, rows=2, prompts=0)
    config = tiny_recipe(
        tmp_path, tokenizer_folder, evaluation=section, checkpoint_every=checkpoint_every
    )
    assert dies_at(monkeypatch, config, 0, failure) == []  # before the first step
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert [line["step"] for line in dies_at(monkeypatch, config, 1, failure)] == [0]
    assert states(tmp_path) == ["2"]
    # The evaluation before the first step is that of step 2, which is missing.
    assert [line["step"] for line in dies_at(monkeypatch, config, 1)] == [0, 2]
    assert "resumed from step 2" in capsys.readouterr().out
    assert states(tmp_path) == ["2", "4"]
    run_training(config)
    found = evaluations(tmp_path)
    assert [line["step"] for line in found] == [0, 2, 4]
    run_training(config)  # it is finished
    assert evaluations(tmp_path) == found
    assert metric_lines(tmp_path) == metric_lines(finished)


def test_several_processes_have_a_state_before_they_evaluate(
    tokenizer_folder, tmp_path, monkeypatch
):
    """They fail apart, and can write none then."""
    monkeypatch.setattr("train.loop.jax_processes", lambda: SimpleNamespace(count=2))
    section = EvaluationSection(every=2, rows=2, prompts=0)
    config = tiny_recipe(tmp_path, tokenizer_folder, evaluation=section, checkpoint_every=100)

    def run(self, parameters, at):
        if metric_lines(tmp_path):
            raise Failed
        return {"loss": 1.0}

    monkeypatch.setattr(Evaluation, "run", run)
    with pytest.raises(Failed):
        run_training(config)
    assert states(tmp_path) == ["2"]


@pytest.mark.full
def test_a_run_that_goes_on_between_two_evaluations_adds_none(
    tokenizer_folder, tmp_path, monkeypatch
):
    section = EvaluationSection(every=4, rows=2, prompts=0)
    config = tiny_recipe(tmp_path, tokenizer_folder, evaluation=section, checkpoint_every=2)
    run_until_killed(config, 3)
    assert [line["step"] for line in dies_at(monkeypatch, config, 1)] == [0]
    assert states(tmp_path) == ["2", "4"]


@pytest.mark.full
def test_a_run_without_masks_is_asked_too(finished, tokenizer_folder, tmp_path):
    said = LLM(finished / "hf", dtype="float32").generate([ASKED[0]], SamplingParams(max_tokens=2))
    section = EvaluationSection(
        every=1,
        rows=2,
        questions=str(write_questions(tmp_path / "questions.jsonl", said)),
        answer_tokens=2,
    )
    changes = {"objective": "ar", "steps": 1, "optimizer": OptimizerSection(warmup_steps=0)}
    run_training(tiny_recipe(tmp_path, tokenizer_folder, evaluation=section, **changes))
    _, line = evaluations(tmp_path)
    assert (line["questions"], line["questions_cut"]) == (2, 2)
    assert line["question_tokens_per_forward"] == 1  # AR, exactly
    assert "tokens_per_forward" not in line


@pytest.mark.full
def test_eight_devices_decode_what_one_decodes(tokenizer_folder):
    section = EvaluationSection(every=1, rows=8, prompts=2, max_tokens=6)
    config = tiny_recipe(Path("unused"), tokenizer_folder, rows=8, evaluation=section)
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    held = held_out_rows(config, tokenizer, 0)
    one = make_mesh({}, jax.devices()[:1])
    program = make_program(config, recipe_model(config, tokenizer_folder), one)
    first = program.random_parameters()

    def decoded(sizes, devices):
        mesh = make_mesh(sizes, devices)
        parameters = jax.device_put(first, tree_shardings(mesh, first))
        assert parameters["embed_tokens"][...].sharding.num_devices == len(devices)
        with jax.set_mesh(mesh):
            evaluation = Evaluation(dataclasses.replace(program, mesh=mesh), held)
            once = evaluation._decode(parameters, print)
            # Again with others, for which nothing is compiled: so sharp that entropies differ.
            return [once, evaluation._decode(jax.tree.map(lambda x: 16 * x, parameters), print)]

    alone = decoded({}, jax.devices()[:1])
    assert alone[1]["tokens_per_forward"] != alone[0]["tokens_per_forward"]
    for layout in ({"data": 2, "fsdp": 4}, {"tensor": 2, "sequence": 4}):
        assert decoded(layout, jax.devices()[:8]) == alone


def test_where_no_prompts_are_decoded_it_is_told(capsys):
    mesh = make_mesh({"sequence": 8})
    assert can_decode(mesh, 64)
    assert capsys.readouterr().out == ""
    assert not can_decode(mesh, 60)
    assert "losses only, because hidden_size 60 is not divisible by" in capsys.readouterr().out


def test_a_prompt_is_what_stands_before_the_first_trainable_token():
    rows = {
        "tokens": np.array([[1, 2, 3, 4, 5, 6, 7, 0], [9, 8, 0, 0, 0, 0, 0, 0]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 0, 0, 0, 0, 0, 0]]),
        "trainable": np.array([[0, 0, 1, 1, 1, 1, 1, 0], [0, 1, 0, 0, 0, 0, 0, 0]], bool),
    }
    # The second sample is a document, trainable from its start: its first half.
    assert sorted(prompts_of(rows, 5)) == [[1, 2], [4, 5], [9]]
    two = prompts_of(rows, 2)
    assert two == prompts_of(rows, 5)[:2]
    assert {tuple(map(tuple, prompts_of(rows, 2, seed))) for seed in range(9)} > {
        tuple(map(tuple, two))
    }
    assert prompts_of(rows, 0) == []


def test_held_out_rows_are_drawn_by_the_seed_and_not_the_longest(tmp_path):
    folder = tmp_path / "rows"
    texts = write_jsonl(tmp_path / "a.jsonl", [{"text": "a " * n} for n in range(1, 61)])
    tokenised([texts], folder, row_length=64)
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))

    def held(seed, rows=6):
        section = EvaluationSection(every=1, rows=rows, source=str(folder), seed=seed)
        config = tiny_recipe(tmp_path, EMBEDDED, row_length=64, evaluation=section)
        return held_out_rows(config, tokenizer, 0)

    first = ShardRows(folder, read_manifest(folder), 0)
    assert len(held(0, rows=1000)["tokens"]) == len(first) > 12
    drawn = held(0)
    np.testing.assert_array_equal(drawn["tokens"], held(0)["tokens"])
    assert not np.array_equal(drawn["tokens"], held(1)["tokens"])
    # The first rows hold one long text each, and others several short ones.
    assert [int(first[i]["segment_ids"].max()) for i in range(6)] == [1] * 6
    assert drawn["segment_ids"].max(axis=1).sum() > 6


def write(path, count):
    """Questions of three regimes, one without right answers; the answer to question i is i."""
    rows = [
        {
            "messages": [{"role": "user", "content": f"number {i}?"}],
            "answer": str(i),
            "match": "last_number" if i % 3 else None,
            "regime": ("prose", "odd", "even")[i % 3],
        }
        for i in range(count)
    ]
    return write_jsonl(path, rows)


def section(path, **changes):
    return EvaluationSection(every=2, questions=str(path), answer_tokens=8, **changes)


def test_some_are_drawn_by_the_seed_regime_by_regime(tmp_path):
    path = write(tmp_path / "questions.jsonl", 30)

    def drawn(**changes):
        return [int(one.answer) for one in drawn_questions(section(path, **changes))]

    five = drawn(most_questions=5)
    assert len(five) == 5
    assert five == sorted(five, key=lambda i: (i % 3, i))
    assert five == drawn(most_questions=5) != drawn(most_questions=5, seed=1)
    assert set(five) <= set(drawn(most_questions=20)) < set(drawn()) == set(range(30))
    none = dataclasses.replace(section(path), every=0)
    assert drawn_questions(none) == drawn_questions(EvaluationSection(every=2)) == []


def asked(path, tokenizer, room=256, **changes):
    config = tiny_recipe("unused", None, evaluation=section(path, **changes))
    return asked_questions(config, drawn_questions(config.evaluation), tokenizer, room)


def test_a_prompt_without_room_is_refused_by_line(tmp_path, tokenizer_folder):
    for prompt, sentence in (
        ("long " * 300, r"line 1: .*answer_tokens=8 do not fit .* of 256"),
        ("", "line 1: prompt: expected at least one token"),
    ):
        path = write_jsonl(tmp_path / "questions.jsonl", [{"prompt": prompt, "answer": "x"}])
        with pytest.raises(InputError, match=sentence):
            asked(path, tokenizer_folder)


class Parrot:
    """In the stead of an engine: says each prompt's number, and a wrong one to number 4."""

    def __init__(self, tokenizer):
        self._codec, self.heard = TextCodec.load(tokenizer), []

    def decode(self, requests, told, max_forwards):
        return [self._say(self._codec.decode(request.prompt)) for request in requests]

    def _say(self, prompt):
        number = prompt.partition("number ")[2].partition("?")[0]
        self.heard.append(number)
        ids = self._codec.encode(f"it is {number if number != '4' else '5'}")
        return Completion(None, ids, "length" if number == "1" else "abort", 2, 40)


@pytest.mark.parametrize("processes", [1, 3, 20])
def test_processes_ask_each_question_once_and_count_together(tmp_path, tokenizer_folder, processes):
    questions = asked(write(tmp_path / "questions.jsonl", 9), tokenizer_folder)
    parrot = Parrot(tokenizer_folder)
    shares = [slice(i, None, processes) for i in range(processes)]
    counts = [questions.answer(parrot, share, print) for share in shares]
    assert sorted(parrot.heard) == [str(i) for i in range(9)]
    record = questions.record(sum(counts[1:], counts[0]))
    made = record.pop("question_tokens_per_forward")
    assert made > 1
    assert record == {
        "question_accuracy": 5 / 6,
        "question_accuracy/odd": 2 / 3,
        "question_accuracy/even": 1.0,
        "questions": 9,
        "questions_cut": 1,
    }
