"""`wedlm bench` on a tiny checkpoint: what is compared decodes the same work, and what is counted
is there."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import infer.bench.chunks
import infer.bench.floor
import infer.bench.gaps
import infer.bench.subject
import infer.bench.work
import wedlm_jax.engine.settings
from infer.bench.chunks import CHUNK, products_of
from infer.bench.command import main
from infer.bench.floor import ForwardCost, PromptCost, _programs_watched
from infer.bench.gaps import Gap
from infer.bench.pages import PageUse
from infer.bench.products import _products
from infer.bench.rival import Rival, config_for_transformers
from infer.bench.subject import SHAPES, Subject, load_subject
from infer.bench.windows import ways_of
from infer.bench.work import mixed
from infer.speed import Speed
from wedlm_jax.benchmark import Stopwatch
from wedlm_jax.engine.burst import Request
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import read_questions


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("questions") / "heldout.jsonl"
    rows = [
        {"regime": regime, "kind": "k", "prompt": f"{i} +", "answer": "2", "match": match}
        for regime, match in (("prose", None), ("reasoning", "contains"))
        for i in range(8)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def subject(checkpoint: Path) -> Subject:
    return load_subject(str(checkpoint), "float32")


def figures(path: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    assert result.pop("machine")["jax"] == jax.__version__
    return result


def test_the_work_is_the_same_every_time(subject: Subject, questions: Path) -> None:
    regimes = read_questions(questions)
    work = mixed(subject, regimes, 24, "verified")
    assert work == mixed(subject, regimes, 24, "verified")
    limits = {params.max_tokens for _, params in work}
    assert 4 <= min(limits) < 20 < max(limits) <= 160
    long = [tuple(prompt) for prompt, _ in work[::8]]
    assert min(map(len, long)) > 2 * max(len(prompt) for prompt, _ in work[1:8])
    assert len({prompt[:20] for prompt in long}) == len(long), "no two have the same shots"


def test_ar_has_no_modes() -> None:
    ways = ways_of([4, 0, "auto"], ["paper", "verified"])
    assert ways == [
        (0, "verified"),
        (4, "paper"),
        ("auto", "paper"),
        (4, "verified"),
        ("auto", "verified"),
    ]


@pytest.mark.full
def test_windows_are_compared_and_drawn(
    checkpoint: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infer.bench.work, "MAX_TOKENS", 8)
    output, plot = tmp_path / "speeds.json", tmp_path / "speeds.svg"
    arguments = (
        f"--model {checkpoint} --questions {questions} --batch-size 2 --prompts 5 --passes 2 "
    )
    arguments += f"--window-size 0 2 --output {output} --plot {plot}"
    assert main(arguments.split()) == 0
    speeds = [Speed(**record) for record in figures(output)["windows"]]
    assert [speed.way for speed in speeds] == ["AR", "W = 2, paper", "W = 2, verified"] * 2
    assert [speed.regime for speed in speeds] == ["prose"] * 3 + ["reasoning"] * 3
    for ar, paper, verified in (speeds[:3], speeds[3:]):
        assert all(len(s.seconds) == 2 and min(s.seconds) > 0 for s in (ar, paper, verified))
        assert ar.tokens == verified.tokens, "verified says what AR says"
        assert ar.forwards == ar.tokens, "AR takes a forward for each token"
        assert verified.forwards <= verified.tokens
        assert 0 < paper.tokens <= 5 * 8
    printed, drawn = capsys.readouterr().out, plot.read_text(encoding="utf-8")
    assert all(speed.way in printed and speed.way in drawn for speed in speeds)


@pytest.mark.parametrize("kind", ["wedlm", "qwen3"])
@pytest.mark.full
def test_drafts_are_compared_by_where_they_come_from(
    kind: str,
    checkpoint: Path,
    questions: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(infer.bench.work, "MAX_TOKENS", 8)
    model, output = tmp_path / kind, tmp_path / "drafts.json"
    shutil.copytree(checkpoint, model)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    (model / "config.json").write_text(json.dumps(config | {"model_type": kind}))
    arguments = f"--compare drafts --model {model} --questions {questions} --batch-size 2 "
    arguments += f"--prompts 3 --passes 1 --regime prose --output {output}"
    assert main(arguments.split()) == 0
    speeds = [Speed(**record) for record in figures(output)["drafts"]]
    masks = ["masks"] if kind == "wedlm" else []
    assert [speed.way for speed in speeds] == ["AR", *masks, "lookup, always", "auto"]
    assert len({speed.tokens for speed in speeds}) == 1, "drafts change no token"
    ar, always = speeds[0], speeds[-2]
    assert ar.forwards == ar.tokens
    assert not any(ar.drafts.values())
    assert always.drafts["lookup"] > 0 == always.drafts["masks"]
    assert always.forwards == always.tokens - always.drafts["lookup_accepted"]
    printed = capsys.readouterr().out
    # A narrow table breaks names between their words.
    assert all(word in printed for speed in speeds for word in speed.way.split())


@pytest.mark.full
def test_a_forward_is_compared_with_its_products(
    checkpoint: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.bench.floor, "FORWARDS_OF_ONE", 4)
    monkeypatch.setattr(infer.bench.floor, "FORWARDS_OF_MANY", 2)
    monkeypatch.setattr(infer.bench.floor, "PROMPTS", 2)
    output = tmp_path / "floor.json"
    arguments = f"--compare floor --model {checkpoint} --questions {questions} --batch-size 1 2 "
    arguments += f"--window-size 0 2 --mode verified --passes 2 --output {output}"
    assert main(arguments.split()) == 0
    read = figures(output)
    costs = [ForwardCost(**record) for record in read["floor"]]
    assert [(cost.way, cost.sequences) for cost in costs] == [
        ("AR", 1),
        ("W = 2, verified", 1),
        ("AR", 2),
        ("W = 2, verified", 2),
    ]
    # In the midst of completions, a forward has a token of each, or a window and its anchor.
    assert [cost.tokens for cost in costs[::2]] == [1, 2]
    assert all(3 * c.sequences <= c.tokens <= 5 * c.sequences for c in costs[1::2])
    assert all(cost.computed >= cost.tokens and cost.ratio > 0 for cost in costs)
    prompts = [PromptCost(**record) for record in read["prompts"]]
    assert [cost.way for cost in prompts] == ["AR", "W = 2, verified"]
    for cost in prompts:
        assert len(cost.request) == len(cost.device) == 2
        assert min(cost.device) > 0
        assert cost.forward > 0


def test_all_programs_of_a_request_are_watched(subject: Subject) -> None:
    engine = subject.engine(0, 1)
    request = Request(0, [5, 9, 7], SamplingParams(max_tokens=1))
    engine.decode([request])
    engine.scheduler.forget_prefixes()
    watch, whole = Stopwatch(), Stopwatch()
    with _programs_watched(engine, watch):
        whole.around(engine.decode)([request])
    assert watch.calls == 2, "one that lets the sequence in, and a burst"
    assert 0 < watch.seconds < whole.seconds
    engine.decode([request])
    assert watch.calls == 2, "not watched any more"


def test_the_products_are_those_of_the_layers(subject: Subject) -> None:
    """One turn against the same products in NumPy."""
    engine = subject.engine(0, 1)
    x = np.linspace(-0.1, 0.1, 3 * 32, dtype=np.float32).reshape(3, 32)
    layer, head = subject.model.layers[0], subject.model.head_matrix()
    a, mlp = layer.self_attn, layer.mlp

    def through(x: np.ndarray, *linears: Any) -> list[np.ndarray]:
        return [x @ np.asarray(linear.weight[...]).T for linear in linears]

    q, k, v = through(x, a.q_proj, a.k_proj, a.v_proj)
    y = x + through(q + np.tile(k + v, (1, 2)), a.o_proj)[0]
    gate, up = through(y, mlp.gate_proj, mlp.up_proj)
    y = y + through(gate / (1 + np.exp(-gate)) * up, mlp.down_proj)[0]
    zeros = jnp.zeros((3, subject.config.vocab_size))
    logits = engine.run_model(_products, jnp.asarray(x), zeros, jnp.int32(1))
    np.testing.assert_allclose(logits, y @ np.asarray(head).T, rtol=2e-4, atol=2e-4)


def test_gaps_between_bursts(
    checkpoint: Path, questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.bench.gaps, "SHORTEST", 0.0)
    monkeypatch.setattr(infer.bench.gaps, "STREAM_SECONDS", 1e-9)  # a forward a burst
    output = tmp_path / "gaps.json"
    arguments = f"--compare gaps --model {checkpoint} --questions {questions} --batch-size 2 "
    arguments += f"--window-size 0 --passes 1 --output {output}"
    assert main(arguments.split()) == 0
    long, ahead, by_turns = [Gap(**record) for record in figures(output)["gaps"]]
    assert [gap.way for gap in (long, ahead, by_turns)] == [
        f"AR, {name}" for name in ("long bursts", "short, ahead", "short, by turns")
    ]
    assert by_turns.bursts > 4 * long.bursts
    assert ahead.bursts > 4 * long.bursts
    assert by_turns.waits > 0  # the host reads a result before it plans the next burst
    assert ahead.waits >= 0


@pytest.mark.full
def test_pages_and_memory(checkpoint: Path, questions: Path, tmp_path: Path) -> None:
    output = tmp_path / "pages.json"
    arguments = f"--compare pages --model {checkpoint} --questions {questions} --batch-size 4 "
    arguments += f"--window-size 0 --output {output}"
    assert main(arguments.split()) == 0
    (use,) = [PageUse(**record) for record in figures(output)["pages"]]
    assert use.rectangles == 1
    assert 0 < use.held <= use.written <= 1
    assert 0 < use.useful <= 1
    assert 1 < use.fitting <= 4, "more than one sequence of mixed lengths has room for the longest"


@pytest.mark.full
def test_a_long_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(wedlm_jax.engine.settings.CHUNK_TOKENS, "cpu", 128)
    small = dataclasses.replace(SHAPES["embedded"], num_hidden_layers=1, vocab_size=64)
    monkeypatch.setitem(SHAPES, "embedded", small)
    monkeypatch.setattr(infer.bench.chunks, "QUIET_FORWARDS", 4)
    output = tmp_path / "chunks.json"
    arguments = f"--compare chunks --prompt-tokens 3072 --passes 1 --output {output}"
    assert main(arguments.split()) == 0
    (cost,) = figures(output)["chunks"]
    assert cost["tokens"] == 3072
    assert cost["stalled"] == 0, "each of the others had a token in every burst"
    assert cost["first"] > 0
    assert cost["forward_tokens"] <= 32
    assert cost["quiet"] < cost["busy"] <= cost["longest"]


def test_products_of_a_chunk_by_counting() -> None:
    config = dataclasses.replace(SHAPES["embedded"], num_hidden_layers=1)
    seen = sum(100 + place + 1 for place in range(CHUNK))
    attention = seen * 4 * 32 * 2  # scores, and values weighed by them
    linear = CHUNK * config.num_parameters(embeddings=False)
    assert products_of(config, 100) == attention + linear


@pytest.mark.full
def test_a_shape_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = dataclasses.replace(
        SHAPES["qwen3-0.6b"],
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=64,
        mask_token_id=3,
    )
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", small)
    monkeypatch.setattr(infer.bench.subject, "SHORT_CONTEXT", 128)
    monkeypatch.setattr(infer.bench.floor, "RANDOM_TOKENS", 16)
    monkeypatch.setattr(infer.bench.floor, "PROMPTS", 1)
    output = tmp_path / "shape.json"
    arguments = f"--shape qwen3-0.6b --dtype float32 --window-size 0 --passes 1 --output {output}"
    assert main(arguments.split()) == 0
    assert [cost["tokens"] for cost in figures(output)["floor"]] == [1]


@pytest.mark.full
def test_the_rival_says_what_we_say(subject: Subject) -> None:
    pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    prompts = [rng.integers(8, 300, size).tolist() for size in (5, 11, 3)]
    params = SamplingParams(max_tokens=8)
    engine = subject.engine(0, 2)
    ours = engine.decode([Request(i, prompt, params) for i, prompt in enumerate(prompts)])
    rival = Rival(subject)
    assert rival.decode(prompts, max_tokens=8, sequences=2) == [one.token_ids for one in ours]
    before = rival.forwards
    drafted = rival.decode(prompts, max_tokens=8, sequences=1, lookup=True)
    assert drafted == [one.token_ids for one in ours]
    assert rival.forwards - before <= sum(len(one.token_ids) for one in ours)


def test_a_rival_that_is_not_there(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, questions: Path
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"wedlm-jax\[rival\]"):
        main(f"--model {checkpoint} --questions {questions} --rival transformers".split())


def test_a_shape_that_transformers_has_not() -> None:
    both = dataclasses.replace(SHAPES["qwen3-0.6b"], attention_bias=True)
    with pytest.raises(InputError, match="other parameters than qk_norm, attention_bias"):
        config_for_transformers(both, "float32")
    assert config_for_transformers(SHAPES["qwen2.5-0.5b"], "float32")["model_type"] == "qwen2"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--batch-size 0", "--batch-size"),
        ("--passes 0", "--passes"),
        ("--prompts 0", "--prompts"),
        ("--prompts -3", "--prompts"),
        ("--window-size four", "'four'"),
        ("--window-size -1", "'-1'"),
        ("--questions nowhere.jsonl", "nowhere.jsonl"),
        ("--regime verse", "'verse'"),
        ("--plot speeds.bmp", "ends with one of"),
        ("--output /no/such/speeds.json", "no such folder"),
        ("--shape qwen3-0.6b --compare windows", "random weights"),
        ("--shape qwen3-0.6b --model here", "one of them"),
        ("--minutes 3", "an option of soak, not of windows"),
        ("--compare soak --minutes 0", "--minutes"),
        ("--compare identity --prompts 0", "--prompts"),
        ("--compare identity --temperature -0.5", "--temperature"),
        ("--compare identity --window-size 0", "name one"),
        ("--rival transformers --quantization int8", "not rounded"),
        ("--compare chunks --prompt-tokens 40000", "--prompt-tokens"),
    ],
)
def test_bad_options_are_refused(arguments: str, says: str) -> None:
    with pytest.raises(InputError, match=says):
        main(arguments.split())
