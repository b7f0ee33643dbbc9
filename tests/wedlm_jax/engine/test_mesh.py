"""Decoding on a mesh of eight devices gives the tokens of one, and the cache stays cut."""

from __future__ import annotations

import jax
import pytest
from flax import nnx

from tests.training_examples import tiny_transformer
from wedlm_jax.batch_sizes import BatchSizes
from wedlm_jax.engine.engine import Engine
from wedlm_jax.row_result import RowResult
from wedlm_jax.params import SamplingParams
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


HEADER = list(range(20, 56))
PROMPTS += [*([*HEADER, 60 + i] for i in range(6)), HEADER[:7], [*HEADER, 60]]


def decoded(model: nnx.Module) -> tuple[list[RowResult], int]:
    """All prompts through four rows that are taken over, and how many prompt tokens were."""
    engine = Engine(model, window_size=2)  # type: ignore[arg-type]
    requests = [(prompt, PARAMS[i % 4]) for i, prompt in enumerate(PROMPTS)]
    scheduler = Scheduler(engine, requests, rows=4)
    results = dict(item for some in scheduler.run() for item in some)
    return [results[i] for i in range(len(PROMPTS))], scheduler.reused_tokens


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}])
def test_tokens_and_counts_equal_those_of_one_device(sizes: dict[str, int]) -> None:
    """Each shard of the rows takes over what its own rows hold."""
    expected, reused = decoded(MODEL)
    assert reused >= 6 * len(HEADER)
    mesh = make_mesh(sizes)
    graph, parameters = nnx.split(MODEL)
    parameters = jax.device_put(parameters, tree_shardings(mesh, parameters))
    with jax.set_mesh(mesh):
        results, reused = decoded(nnx.merge(graph, parameters))
    assert results == expected
    assert reused >= 4 * len(HEADER), "computed once a shard at most"


@pytest.mark.parametrize("sizes", [{"data": 2, "tensor": 4}])
def test_each_device_holds_its_own_part_of_the_cache(sizes: dict[str, int]) -> None:
    mesh = make_mesh(sizes)
    with jax.set_mesh(mesh):
        batch = Engine(MODEL, window_size=2).open(
            BatchSizes(rows=4, cache_size=64, max_output=32, num_stops=4)
        )
    cache = batch._state.cache.keys
    layers, rows, heads, size, width = cache.shape
    shards = {shard.data.shape for shard in cache.addressable_shards}
    assert shards == {(layers, rows // sizes["data"], heads // sizes["tensor"], size, width)}
