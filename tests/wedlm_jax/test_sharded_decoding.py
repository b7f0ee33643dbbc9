"""Decoding on a mesh of eight devices gives the tokens of one, and the cache stays cut."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from tests.training_examples import tiny_transformer
from wedlm_jax.engine import Engine
from wedlm_jax.row_result import RowResult
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.sharding import make_mesh, tree_shardings

MODEL = tiny_transformer(
    vocab_size=104, hidden_size=16, intermediate_size=24, num_attention_heads=8,
    num_key_value_heads=4,
)  # fmt: skip
PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15], [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, mode=mode, seed=i, entropy_threshold=4.0)
    for i, (n, t, mode) in enumerate([
        (9, 0.0, "paper"), (12, 0.8, "verified"), (5, 0.0, "ar"), (8, 0.0, "verified"),
    ])
]  # fmt: skip


def decoded(model: nnx.Module, mesh: jax.sharding.Mesh | None = None) -> list[RowResult]:
    engine = Engine(model, window_size=4)  # type: ignore[arg-type]
    batch = engine.start(PROMPTS, PARAMS)
    assert batch.advance()
    if mesh is not None:
        cache = batch._state.cache.keys
        shards = {shard.data.shape for shard in cache.addressable_shards}
        layers, rows, heads, size, width = cache.shape
        data, tensor = mesh.shape["data"], mesh.shape["tensor"]
        assert shards == {(layers, rows // data, heads // tensor, size, width)}
    return batch.results()


def scheduled(model: nnx.Module, prompts: list[list[int]]) -> tuple[list[RowResult], int]:
    """The same through rows that are taken over, and how many prompt tokens were."""
    engine = Engine(model, window_size=4)  # type: ignore[arg-type]
    requests = [(prompt, PARAMS[i % 4]) for i, prompt in enumerate(prompts)]
    scheduler = Scheduler(engine, requests, rows=4)
    results = dict(item for some in scheduler.run() for item in some)
    return [results[i] for i in range(len(prompts))], scheduler.reused_tokens


def on_mesh(sizes: dict[str, int]) -> tuple[jax.sharding.Mesh, nnx.Module]:
    mesh = make_mesh(sizes)
    graph, parameters = nnx.split(MODEL)
    parameters = jax.device_put(parameters, tree_shardings(mesh, parameters))
    return mesh, nnx.merge(graph, parameters)


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}])
def test_tokens_and_counts_equal_those_of_one_device(sizes: dict[str, int]) -> None:
    expected = decoded(MODEL)
    mesh, model = on_mesh(sizes)
    with jax.set_mesh(mesh):
        assert decoded(model, mesh) == expected


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}])
def test_rows_taken_over_on_a_mesh_equal_those_of_one_device(sizes: dict[str, int]) -> None:
    """Each shard of the rows takes over what its own rows hold."""
    header = list(range(20, 56))
    prompts = [*PROMPTS, *([*header, 60 + i] for i in range(6)), header[:7]]
    expected, reused = scheduled(MODEL, prompts)
    assert reused == 5 * len(header)
    mesh, model = on_mesh(sizes)
    with jax.set_mesh(mesh):
        results, reused = scheduled(model, prompts)
    assert results == expected
    assert reused in (4 * len(header), 5 * len(header)), "computed once a shard at most"
