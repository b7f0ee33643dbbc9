"""Benchmarks of decoding, on a tiny checkpoint: the same work, and what is counted is there."""

import dataclasses

import pytest

import benchmarks.attention
import benchmarks.chunks
import benchmarks.floor
import benchmarks.gaps
import benchmarks.step
import wedlm_jax.engine.settings
from benchmarks.chunks import CHUNK, products_of
from benchmarks.options import SHAPES
from tests.infer.bench.conftest import measured
from tests.infer.few_questions import write_questions
from wedlm_jax.errors import InputError


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    return write_questions(tmp_path_factory.mktemp("questions") / "heldout.jsonl")


@pytest.fixture(scope="module")
def given(checkpoint, questions):
    return f"--model {checkpoint} --questions {questions}"


@pytest.mark.full
def test_a_forward_is_compared_with_its_products(given, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.floor, "FORWARDS_OF_ONE", 4)
    monkeypatch.setattr(benchmarks.floor, "FORWARDS_OF_MANY", 2)
    monkeypatch.setattr(benchmarks.floor, "PROMPTS", 2)
    options = "--batch-size 1 2 --window-size 0 2 --mode verified --passes 2"
    read = measured(benchmarks.floor.main, tmp_path, f"{given} {options}")
    costs = read["floor"]
    assert [(cost["way"], cost["sequences"]) for cost in costs] == [
        ("AR", 1),
        ("W = 2, verified", 1),
        ("AR", 2),
        ("W = 2, verified", 2),
    ]
    # In the midst of completions, a forward has a token of each, or a window and its anchor.
    assert [cost["tokens"] for cost in costs[::2]] == [[1, 1], [2, 2]]
    for cost in costs:
        floor, slots = cost["products alone, ms"], 5 * cost["sequences"]
        assert all(
            3 / 5 * slots <= tokens <= slots for tokens in cost["tokens"] if cost["way"] != "AR"
        )
        assert all(a >= b for a, b in zip(cost["computed"], cost["tokens"], strict=True))
        assert len(floor) == 2
        assert cost["×"] == pytest.approx(sum(cost["ms"]) / sum(floor))
    for request, forward in zip(read["prompts"], costs[:2], strict=True):
        assert request["way"] == forward["way"]
        ms = sum(request["ms"]) / 2 - sum(forward["ms"]) / 2
        assert request["less a decode forward"] == pytest.approx(ms)


@pytest.mark.full
def test_gaps_between_bursts(given, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks.gaps, "SHORTEST", 0.0)
    monkeypatch.setattr(benchmarks.gaps, "STREAM_SECONDS", 1e-9)  # a forward per burst
    arguments = f"{given} --batch-size 2 --window-size 0 --passes 1"
    gaps = measured(benchmarks.gaps.main, tmp_path, arguments)["gaps"]
    assert [gap["way"] for gap in gaps] == [
        f"AR, {name}" for name in ("long bursts", "short, ahead", "short, by turns", "a grammar")
    ]
    long, ahead, by_turns, ruled = gaps
    assert ruled["tokens"] == ahead["tokens"] == long["tokens"] > 0
    assert by_turns["bursts"] > 4 * long["bursts"]
    assert ahead["bursts"] > 4 * long["bursts"]
    waits = "the device waits, ms"
    # By turns the host reads a result before it plans the next burst.
    assert min(by_turns[waits]) > 0
    assert min(ahead[waits]) >= 0
    assert by_turns["× long bursts"] == pytest.approx(by_turns["ms"][0] / long["ms"][0])


@pytest.mark.full
def test_a_long_prompt(tmp_path, monkeypatch):
    monkeypatch.setitem(wedlm_jax.engine.settings.CHUNK_TOKENS, "cpu", 128)
    small = dataclasses.replace(SHAPES["embedded"], num_hidden_layers=1, vocab_size=64)
    monkeypatch.setitem(SHAPES, "embedded", small)
    monkeypatch.setattr(benchmarks.chunks, "QUIET_FORWARDS", 4)
    arguments = "--prompt-tokens 3072 --passes 1"
    (cost,) = measured(benchmarks.chunks.main, tmp_path, arguments)["chunks"]
    assert cost["its first 1,024 tokens, alone, ms"] > 0
    assert cost["bursts without a token for one of them"] == 0
    assert cost["tokens per forward beside others"] <= 32
    quiet = cost["others, token to token, alone, ms"]
    busy = cost["others, token to token, meanwhile, on average, ms"]
    assert quiet > 0
    assert 0 < busy <= cost["the longest meanwhile, ms"]


def test_products_of_a_chunk_by_counting():
    config = dataclasses.replace(SHAPES["embedded"], num_hidden_layers=1)
    seen = sum(100 + place + 1 for place in range(CHUNK))
    attention = seen * 4 * 32 * 2  # scores, and values weighed by them
    linear = CHUNK * config.num_parameters(embeddings=False)
    assert products_of(config, 100) == attention + linear


@pytest.mark.full
def test_a_shape_without_a_checkpoint(tmp_path, monkeypatch):
    small = dataclasses.replace(
        SHAPES["qwen3-0.6b"],
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=48,
        vocab_size=64,
        mask_token_id=3,
    )
    monkeypatch.setitem(SHAPES, "qwen3-0.6b", small)
    monkeypatch.setattr(benchmarks.floor, "RANDOM_CONTEXT", 128)
    monkeypatch.setattr(benchmarks.floor, "RANDOM_TOKENS", 16)
    monkeypatch.setattr(benchmarks.floor, "PROMPTS", 1)
    arguments = "--shape qwen3-0.6b --batch-size 1 --window-size 0 --passes 1"
    (cost,) = measured(benchmarks.floor.main, tmp_path, arguments)["floor"]
    assert cost["tokens"] == [1.0]


@pytest.mark.parametrize(
    ("main", "arguments", "says"),
    [
        (benchmarks.floor.main, "--shape qwen3-0.6b --model here", "leave out --model"),
        (benchmarks.chunks.main, "--prompt-tokens 40000", "--prompt-tokens: expected 2048 to"),
        (benchmarks.gaps.main, "--questions nowhere.jsonl", "nowhere.jsonl"),
        (benchmarks.step.main, "--lengths 512 100", "multiples of 32, not 100"),
        (benchmarks.step.main, "--prompt-share 1.5", "between 0 and 1"),
        (benchmarks.attention.main, "--heads 6 --kv-heads 4", "multiple of --kv-heads"),
    ],
)
def test_bad_options_are_refused(main, arguments, says):
    with pytest.raises(InputError, match=says):
        main(arguments.split())
