"""Scores on a tiny checkpoint: every number is that of the completions."""

import json
import re

import pytest
from flax import nnx

import infer.evaluate
from infer.evaluate import decoders_at, evaluate_all
from infer.score import Score
from tests.examples.data import write_jsonl
from tests.infer.few_questions import PROMPTS, write_questions
from wedlm_jax.__main__ import main
from wedlm_jax.checkpoint.adapters import save_drafter
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.engine.config import MOST_LOOKUP
from wedlm_jax.errors import InputError
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question

DECODERS = ("AR", "paper τ=0.4", "verified")


@pytest.fixture(scope="module")
def questions_file(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions") / "heldout.jsonl")


def evaluated(checkpoint, questions, folder, options):
    """The scores that the command writes."""
    output = folder / "scores.json"
    arguments = f"--model {checkpoint} --window-size 4 --batch-size 4 --questions {questions} "
    arguments += f"--passes 1 --output {output} {options}"
    assert infer.evaluate.main(arguments.split()) == 0
    return json.loads(output.read_text(encoding="utf-8"))


def test_the_command_writes_what_it_prints(checkpoint, questions_file, tmp_path, capsys):
    plot = tmp_path / "scores.svg"
    options = f"--samples 2 --entropy-threshold 0.4 --plot {plot} --max-tokens 96"
    scores = evaluated(checkpoint, questions_file, tmp_path, options)
    of_each = [(regime, name) for regime in ("low_entropy", "prose") for name in DECODERS]
    assert [(s["regime"], s["decoder"]) for s in scores] == of_each
    assert [s["accuracy"] for s in scores[3:]] == [None] * 3
    assert all(s["questions"] == 2 and s["tokens"] <= 2 * 96 for s in scores)
    for ar, paper, verified in (scores[:3], scores[3:]):
        assert ar["tokens"] == ar["forwards"] == ar["instances"] == verified["tokens"]
        assert ar["tokens_per_forward"] == ar["p_cache"] == 1, "exactly"
        assert ar["as_first"] == verified["as_first"] == ar["ar_agrees"] == 1
        assert verified["ar_agrees"] == 1
        assert paper["ar_agrees"] < 1, "random weights: masks and AR rows say different things"
        assert paper["tokens_per_forward"] == paper["tokens"] / paper["forwards"]
        assert all(len(s["seconds"]) == 1 and s["seconds"][0] > 0 for s in (ar, paper, verified))
    printed = capsys.readouterr().out
    assert all(f"{s['tokens_per_forward']:.2f}" in printed for s in scores)
    for name in ("AR agrees", "tokens/forward", "tokens/second"):
        assert f"\n{name} " in printed, "a column's name in the legend is on one line"
    drawn = plot.read_text(encoding="utf-8")
    assert all(name in drawn for name in ("low entropy", "prose", "verified", "paper"))


def test_own_questions_give_answers_and_verdicts_of_the_chosen_decoders(
    checkpoint, llm, tmp_path, capsys
):
    """A prompt is completed as it stands, as the same line of `wedlm generate` is."""
    params = SamplingParams(max_tokens=24)
    texts = [completion.text or "" for completion in llm.generate(list(PROMPTS), params)]
    rows = [
        {"prompt": prompt, "answer": text[1:4] or "x", "match": "contains"}
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    rows[-1] = {"prompt": PROMPTS[-1], "answer": "nobody says this"}
    questions, answers = tmp_path / "q.jsonl", tmp_path / "answers.jsonl"
    write_jsonl(questions, rows)
    options = f"--answers {answers} --decoders verified --max-tokens 24"
    (score,) = evaluated(checkpoint, questions, tmp_path, options)
    assert (score["regime"], score["decoder"]) == ("q", "verified")
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [(row["prompt"], row["text"]) for row in rows] == list(zip(PROMPTS, texts, strict=True))
    assert [row["match"] for row in rows] == ["contains"] * 3 + ["exact"]
    assert rows[-1]["right"] is False
    assert score["accuracy"] == sum(row["right"] for row in rows) / 4
    assert 0 < score["accuracy"] < 1
    assert score["cut"] == sum(row["finish_reason"] == "length" for row in rows) > 0
    printed = capsys.readouterr()
    assert f"{score['cut']} of 4 answers were cut at 24 tokens" in printed.err
    # Without AR there is nothing that is AR's.
    assert "as AR" not in printed.out
    assert re.search(r"as first +completions that equal those of verified", printed.out)
    assert "relative to verified" in printed.out


def test_a_question_that_leaves_no_room_is_refused_by_line_before_any_is_decoded(
    checkpoint, questions_file, tmp_path
):
    with pytest.raises(InputError, match=rf"{questions_file} line 1: "):
        evaluated(checkpoint, questions_file, tmp_path, "--decoders ar --max-model-len 2")


def test_answers_are_as_long_as_the_context_allows(checkpoint):
    (decoder,) = decoders_at(
        str(checkpoint), [], kinds=["ar"], max_model_len=24, max_tokens=320, ignore_eos=True
    )
    questions = [Question(text, "x", "exact") for text in ("the cat", "the cat sat on the mat")]
    answers = []
    evaluate_all(
        [decoder], [questions], passes=1, on_answers=lambda _, __, found: answers.extend(found)
    )
    for question, answer in zip(questions, answers, strict=True):
        assert len(answer.token_ids) == 24 - len(decoder.llm.as_ids(question.prompt))


def test_a_default_that_is_slower_than_ar_is_told(capsys):
    slower = "slower than AR: 0.50x in low entropy; "
    for seconds, warning in (
        ([(2.0, 2.0, 9.0), (1.0, 2.01, 9.0)], ""),
        ([(1.0, 9.0, 9.0), (2.0, 9.0, 18.0)], slower),
    ):
        ar, verified = (
            Score(decoder=name, regime="low_entropy", as_first=1, ar_agrees=1, tokens=9, seconds=s)
            for name, s in zip(("AR", "verified"), seconds, strict=True)
        )
        infer.evaluate._tell_slower([ar, verified])
        infer.evaluate._tell_slower([verified])
        printed = capsys.readouterr().err
        assert warning in printed
        assert bool(printed) == bool(warning)


def test_a_model_that_knows_no_masks_has_two_decoders(stock, capsys):
    decoders = decoders_at(str(stock), [0.4])
    assert [d.name for d in decoders] == ["AR", "verified"]
    assert [d.llm.engine.settings.lookup for d in decoders] == [0, MOST_LOOKUP]
    assert not any(d.llm.engine.settings.window for d in decoders)
    assert "not trained on masks" in capsys.readouterr().err
    [alone] = decoders_at(str(stock), [0.4], kinds=["verified"])
    assert (alone.name, alone.llm.engine.settings.window) == ("verified", 0)
    with pytest.raises(InputError, match=r"^--decoders: mode paper needs masks, but .*qwen3 was"):
        decoders_at(str(stock), [0.4], kinds=["paper"])


def test_masks_of_a_drafter_are_not_asked_to_decide(stock, tmp_path, capsys):
    model = load_checkpoint(stock)
    lora = LoraConfig(rank=2, alpha=4.0, rows="masked")
    adapters = nnx.state(with_adapters(model, lora, nnx.Rngs(0)), nnx.LoRAParam)
    base = open_checkpoint(stock)
    save_drafter(adapters, lora, tmp_path / "drafter", base=base, dtype="float32")
    drafter = str(tmp_path / "drafter")
    decoders = decoders_at(str(stock), [0.4], window_size=4, drafter=drafter)
    assert [d.name for d in decoders] == ["AR", "verified"]
    assert [d.llm.engine.settings.window for d in decoders] == [0, 4]
    assert (
        "a drafter's masks only propose tokens: mode paper is left out" in capsys.readouterr().err
    )
    with pytest.raises(InputError, match="mode paper needs masks, but a drafter's masks only"):
        decoders_at(str(stock), [0.4], kinds=["paper"], drafter=drafter)


@pytest.mark.parametrize("command", ["evaluate", "bench --compare windows"])
def test_what_does_not_fit_the_model_is_refused_before_it_is_loaded(
    command, checkpoint, monkeypatch, capsys
):
    monkeypatch.setattr("wedlm_jax.checkpoint.model.load_parameter", None)
    name, *rest = command.split()
    arguments = [name, "--model", str(checkpoint), *rest, "--window-size", "1000000"]
    assert main(arguments) == 2
    (message,) = capsys.readouterr().err.splitlines()[-1:]
    assert message == (
        f"wedlm {name}: --window-size: expected at most 320, the longest text (max_model_len), "
        "not 1000000"
    )
