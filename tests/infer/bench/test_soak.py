"""What a long run is judged by."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import infer.bench.soak
from infer.bench.command import main
from infer.bench.soak import SoakSample, failure_of, random_work, resident_bytes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.params import SamplingParams


def sampled(*resident: float, compiled: int = 0) -> list[SoakSample]:
    return [SoakSample("AR", minute, 1, 1, mib, compiled) for minute, mib in enumerate(resident)]


@pytest.mark.parametrize(
    ("samples", "failure"),
    [
        # The first quarter may still grow.
        (sampled(500, 1000, 1001, 1002, 1001), None),
        (sampled(1000), None),
        (sampled(500, 1000, 1030, 1060, 1100), "memory grew by 10.0%"),
        (sampled(1000, 1000, 1000, 1000, 1000, compiled=1), "1 programs were compiled"),
    ],
)
def test_memory_must_stay_flat_and_nothing_be_compiled(
    samples: list[SoakSample], failure: str | None
) -> None:
    found = failure_of(samples)
    assert found is None if failure is None else failure in (found or "")


def test_memory_in_use_is_seen_to_grow() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * 2**26)
    assert resident_bytes() - before > len(held) // 2


def test_prompts_are_the_same_every_time_and_of_all_lengths() -> None:
    def some(count: int) -> list:
        work = random_work(100, 500, SamplingParams(), until=float("inf"))
        return [next(work) for _ in range(count)]

    work = some(400)
    assert work[:20] == some(20)
    lengths = [len(prompt) for prompt, _ in work]
    assert min(lengths) <= 2
    assert 400 < max(lengths) <= 500
    assert np.median(lengths) < 100, "short ones most often"
    assert {0 <= token < 100 for prompt, _ in work for token in prompt} == {True}
    assert len({params.seed for _, params in work}) == 400
    assert not list(random_work(100, 500, SamplingParams(), until=0.0))


@pytest.mark.full
def test_a_short_run_ends_with_what_it_did(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(infer.bench.soak, "MAX_TOKENS", 4)
    monkeypatch.setattr(infer.bench.soak, "GROWTH_ALLOWED", 9.0)  # nothing is warm yet
    output = tmp_path / "soak.json"
    arguments = f"--compare soak --model {checkpoint} --batch-size 2 --window-size 2 --minutes 0.02"
    assert main([*arguments.split(), "--output", str(output)]) == 0
    samples = json.loads(output.read_text(encoding="utf-8"))["soak"]
    assert samples[-1]["way"] == "W = 2, verified"
    assert samples[-1]["prompts"] >= 2
    assert samples[-1]["tokens"] >= samples[-1]["prompts"]
    assert samples[-1]["compiled"] == 0
    assert samples[-1]["resident_mib"] > 50


def test_too_little_time_for_a_prompt_is_told(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "compile", lambda engine: None)
    with pytest.raises(InputError, match="--minutes 1e-09: over before the first prompt"):
        main(["--compare", "soak", "--model", str(checkpoint), "--minutes", "1e-9"])
