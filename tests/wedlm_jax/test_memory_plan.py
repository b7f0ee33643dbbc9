"""What a batch takes is told before it is allocated, and refused where it does not fit."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from wedlm_jax import memory_plan
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.memory_plan import check_memory, device_memory, plan_memory
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import make_mesh, tree_shardings

SIZES = BatchSizes(rows=4, cache_size=64, max_output=32, num_stops=4)


def test_the_plan_counts_what_a_batch_allocates(streaming_engine: Engine) -> None:
    plan = plan_memory(streaming_engine, SIZES, ask_compiler=False)
    state = streaming_engine.open(SIZES)._state
    assert plan.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    assert plan.weights == streaming_engine.parameter_bytes
    assert plan.working == 0


def test_weights_count_where_they_lie(tiny_model: Transformer) -> None:
    graph, parameters = nnx.split(tiny_model)
    whole = sum(x.nbytes for x in jax.tree.leaves(parameters))
    mesh = make_mesh({"fsdp": 2}, jax.devices()[:2])
    cut = jax.device_put(parameters, tree_shardings(mesh, parameters))
    with jax.set_mesh(mesh):
        engine = Engine(nnx.merge(graph, cut), window_size=4)
        plan = plan_memory(engine, SIZES, ask_compiler=False)
    # Norms alone are whole on each.
    assert whole / 2 < plan.weights < whole * 0.55


def test_the_compiler_is_asked_for_working_memory(streaming_engine: Engine) -> None:
    assert plan_memory(streaming_engine, SIZES, ask_compiler=True).working > 0


def limited_to(monkeypatch: pytest.MonkeyPatch, limit: int | None) -> None:
    monkeypatch.setattr(memory_plan, "device_memory", lambda: limit)


def test_a_batch_that_does_not_fit_is_refused_with_rows_that_do(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(streaming_engine, SIZES, ask_compiler=False)
    limit = plan.weights + plan.cache
    limited_to(monkeypatch, limit)
    with pytest.raises(InputError, match=r"4 rows of 64 tokens need .* GiB .*: 3 rows fit"):
        check_memory(streaming_engine, SIZES)
    with pytest.raises(InputError):
        streaming_engine.open(SIZES)


def test_what_only_the_loop_needs_counts_too(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_memory(streaming_engine, SIZES, ask_compiler=True)
    limited_to(monkeypatch, int((plan.weights + plan.cache + plan.working // 2) / 0.95))
    with pytest.raises(InputError, match=r"working memory"):
        check_memory(streaming_engine, SIZES)


def test_not_even_one_row(streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    limited_to(monkeypatch, streaming_engine.parameter_bytes)
    with pytest.raises(InputError, match="not even one row fits"):
        check_memory(streaming_engine, SIZES)


@pytest.mark.parametrize("limit", [None, 2**40])
def test_what_fits_or_cannot_be_told_is_allowed(
    streaming_engine: Engine, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    limited_to(monkeypatch, limit)
    check_memory(streaming_engine, SIZES)


def test_a_cpu_has_what_the_machine_has() -> None:
    memory = device_memory()
    assert memory is not None
    assert memory > 2**30
