"""After a warm-up nothing is left to compile."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax import batch as batch_module
from wedlm_jax import batch_sizes as sizes_module
from wedlm_jax import length_classes as classes_module
from wedlm_jax import llm as llm_module
from wedlm_jax import prefix as prefix_module
from wedlm_jax import scheduler as scheduler_module
from wedlm_jax import warmup as warmup_module
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.compiled_cache import keep_compiled
from wedlm_jax.engine import Engine
from wedlm_jax.llm import LLM
from wedlm_jax.model import Transformer
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.warmup import warm_up


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sizes_module, batch_module, scheduler_module, warmup_module):
        monkeypatch.setattr(module, "LONGEST_PIECE", 16)
    for module in (batch_module, warmup_module):
        monkeypatch.setattr(module, "SMALLEST_LIVE", 32)
    monkeypatch.setattr(sizes_module, "SMALLEST_PROMPT_BUCKET", 8)
    monkeypatch.setattr(batch_module, "LOOKAHEAD", 4)
    monkeypatch.setattr(prefix_module, "SHORTEST_PREFIX", 4)


def test_requests_of_every_kind_compile_nothing_more(tiny_model: Transformer) -> None:
    engine = Engine(tiny_model, window_size=4)
    rng = np.random.default_rng(0)
    header = rng.integers(2, 22, 20).tolist()
    requests = []
    for i in range(40):
        prompt = header[: rng.integers(0, 20)] + rng.integers(2, 22, rng.integers(1, 9)).tolist()
        requests.append((prompt, SamplingParams(max_tokens=int(rng.integers(1, 18)), seed=i)))
    sizes = BatchSizes.for_rows(engine, requests, count=4)
    steps: list[tuple[int, int]] = []
    warm_up(engine, [sizes], lambda done, total: steps.append((done, total)))
    assert [done for done, _ in steps] == list(range(1, steps[-1][1] + 1))
    programs = engine.num_programs
    scheduler = Scheduler(engine, requests, rows=4)
    assert sum(len(some) for some in scheduler.run()) == 40
    assert scheduler.reused_tokens > 0
    assert engine.num_programs == programs


def test_batches_of_every_length_class_compile_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classes_module, "SMALLEST_CLASS", 32)
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    llm = LLM(folder, window_size=0, max_model_len=48, max_batch_size=4, max_cache_tokens=128)
    longest = SamplingParams(max_tokens=12)
    llm.warm_up(longest)
    assert [(each.rows, each.cache_size) for each in llm._sizes] == [(4, 32), (2, 64)]
    programs = llm.engine.num_programs
    prompts = [[token] * length for token, length in enumerate([5, 36, 9, 28, 3, 17] * 3, 3)]
    llm.generate(prompts, dataclasses.replace(longest, max_tokens=9))
    llm.generate([[5] * 36], longest)
    assert llm.engine.num_programs == programs


@pytest.mark.parametrize(("context", "limit"), [(90, 30), (95, 12), (96, 1), (19, 2)])
def test_the_sizes_hold_every_prompt_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, limit: int
) -> None:
    monkeypatch.setattr(llm_module, "warm_up", lambda engine, sizes, on_step: None)
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    llm = LLM(folder, window_size=0, max_model_len=context, max_batch_size=4)
    params = SamplingParams(max_tokens=limit, logprobs=2, repetition_penalty=1.5)
    llm.warm_up(params)
    (sizes,) = llm._sizes
    assert sizes.rows == 4
    for length in range(1, context):
        most = min(limit, context - length)
        for tokens in {1, most}:
            one = dataclasses.replace(params, max_tokens=tokens)
            assert sizes.holds(llm.engine, [5] * length, one), (length, tokens)


def test_compiled_programs_are_kept_where_the_user_s_caches_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = jax.config.jax_compilation_cache_dir
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        jax.config.update("jax_compilation_cache_dir", None)
        keep_compiled()
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "wedlm-jax" / "compiled")
        keep_compiled(tmp_path / "other")
        assert jax.config.jax_compilation_cache_dir.endswith("compiled"), "the first one stays"
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
