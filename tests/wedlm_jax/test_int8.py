"""Keys, values and weights rounded to 8 bits: how far off they are, and what stays exact."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.decode_examples import TINY, Row, run
from tests.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax import batch as batch_module
from wedlm_jax import batch_sizes as sizes_module
from wedlm_jax import prefix as prefix_module
from wedlm_jax import scheduler as scheduler_module
from wedlm_jax.engine.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.int8 import Int8Rows, to_float, to_int8
from wedlm_jax.llm import LLM
from wedlm_jax.masks import CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.quantization import quantize_weights
from wedlm_jax.params import SamplingParams
from wedlm_jax.scheduler import Scheduler
from wedlm_jax.sharding import make_mesh, tree_shardings

PROMPTS = [(5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16), (3,), (4, 9), (2, 3, 4, 5, 6, 7, 8)]


@given(seed=st.integers(0, 2**31 - 1), size=st.floats(1e-6, 1e4))
def test_a_row_is_off_by_half_a_step_at_most(seed: int, size: float) -> None:
    x = size * np.random.default_rng(seed).standard_normal((3, 5, 16)).astype(np.float32)
    rows = to_int8(jnp.array(x))
    assert (rows.values.dtype, rows.scales.shape) == (jnp.int8, (3, 5))
    step = np.abs(x).max(axis=-1, keepdims=True) / 127
    assert (np.abs(np.array(to_float(rows, jnp.float32)) - x) <= 0.5001 * step).all()


def test_rows_of_zeros_stay_zeros() -> None:
    rows = to_int8(jnp.zeros((2, 8)))
    assert not np.array(to_float(rows, jnp.float32)).any()


@pytest.fixture(scope="module")
def engine(tiny_model: Transformer) -> Engine:
    return Engine(tiny_model, window_size=4, kv_cache_dtype="int8")


def rows_in(mode: str) -> list[Row]:
    params = SamplingParams(
        mode=mode, max_tokens=14, temperature=0.7, entropy_threshold=2.0, draft_budget=50.0
    )
    return [Row(prompt, dataclasses.replace(params, seed=i), 4) for i, prompt in enumerate(PROMPTS)]


def test_the_cache_is_of_bytes_and_changes_what_is_said_but_little(
    engine: Engine, tiny_model: Transformer
) -> None:
    batch = engine.start([row.prompt for row in rows_in("ar")], [r.params for r in rows_in("ar")])
    cache = batch._state.cache
    assert isinstance(cache.keys, Int8Rows)
    assert cache.keys.values.dtype == jnp.int8
    tokens = jnp.array([[*PROMPTS[0]]])
    positions = jnp.arange(tokens.shape[1])[None]
    exact = tiny_model(tokens, positions, CausalMask())
    rounded, kv = tiny_model(tokens, positions, CausalMask(), return_kv=True, int8_kv=True)
    difference = jnp.abs(rounded - exact).max()
    assert 0 < difference < 0.05 * jnp.abs(exact).max()
    # And this is what the cache was given.
    length = tokens.shape[1]
    assert kv is not None
    assert isinstance(kv[0], Int8Rows)
    np.testing.assert_array_equal(cache.keys.values[:, 0, :, :length], kv[0].values[:, 0])


def test_verified_rows_have_the_tokens_of_autoregressive_ones(engine: Engine) -> None:
    """Though these read from the cache what those still have in their windows."""
    expected, found = run(engine, rows_in("ar")), run(engine, rows_in("verified"))
    assert [r.token_ids for r in found] == [r.token_ids for r in expected]
    assert sum(r.num_forwards for r in found) < sum(r.num_forwards for r in expected)


def test_pieces_and_beginnings_taken_over_change_nothing(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [*rows_in("paper"), *rows_in("paper")]
    alone = [run(engine, [row])[0] for row in rows]
    for module in (sizes_module, batch_module, scheduler_module):
        monkeypatch.setattr(module, "LONGEST_PIECE", 4)
    monkeypatch.setattr(sizes_module, "SMALLEST_PROMPT_BUCKET", 4)
    monkeypatch.setattr(prefix_module, "SHORTEST_PREFIX", 4)
    scheduler = Scheduler(engine, [(row.prompt, row.params) for row in rows], rows=2)
    results = dict(item for some in scheduler.run() for item in some)
    assert [results[i] for i in range(len(rows))] == alone
    assert scheduler.reused_tokens > 0


@pytest.mark.slow
def test_on_a_mesh_the_tokens_are_the_same() -> None:
    config = dataclasses.replace(
        TINY, vocab_size=24, num_attention_heads=4, num_key_value_heads=2, hidden_size=16
    )
    model = Transformer(config, rngs=nnx.Rngs(7))
    quantized = quantize_weights(model)
    expected = run(Engine(quantized, window_size=2, kv_cache_dtype="int8"), rows_in("paper"))
    mesh = make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])
    graph, parameters = nnx.split(model)
    placed = nnx.merge(graph, jax.device_put(parameters, tree_shardings(mesh, parameters)))
    with jax.set_mesh(mesh):
        engine = Engine(quantize_weights(placed), window_size=2, kv_cache_dtype="int8")
        assert run(engine, rows_in("paper")) == expected


# --- weights -----------------------------------------------------------------------------


def test_weights_are_bytes_and_products_nearly_as_before(tiny_model: Transformer) -> None:
    model = quantize_weights(tiny_model)
    kernel = model.layers.mlp.up_proj.kernel[...]
    original = tiny_model.layers.mlp.up_proj.kernel[...]
    assert kernel.qvalue.dtype == jnp.int8
    assert kernel.scale.shape == (original.shape[0], 1, original.shape[2])
    back = kernel.qvalue * kernel.scale
    step = jnp.abs(original).max(axis=1, keepdims=True) / 127
    assert (jnp.abs(back - original) <= 0.51 * step).all()
    tokens, positions = jnp.array([[*PROMPTS[0]]]), jnp.arange(len(PROMPTS[0]))[None]
    exact, rounded = (m.logits(m(tokens, positions, CausalMask())[0]) for m in (tiny_model, model))
    assert 0 < jnp.abs(rounded - exact).max() < 0.1 * jnp.abs(exact).max()
    assert tiny_model.layers.mlp.up_proj.kernel[...] is original


def test_a_head_of_its_own_is_rounded_too() -> None:
    config = dataclasses.replace(TINY, tie_word_embeddings=False)
    model = Transformer(config, rngs=nnx.Rngs(0))
    hidden = jax.random.normal(jax.random.key(0), (2, 3, TINY.hidden_size))
    exact, rounded = model.logits(hidden), quantize_weights(model).logits(hidden)
    assert rounded.dtype == jnp.float32
    assert 0 < jnp.abs(rounded - exact).max() < 0.02 * jnp.abs(exact).max()


def test_a_checkpoint_is_decoded_with_both(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("model"))
    plain = LLM(folder, window_size=2)
    rounded = LLM(folder, window_size=2, quantization="int8", kv_cache_dtype="int8")
    assert rounded.engine.parameter_bytes < 0.8 * plain.engine.parameter_bytes
    result = rounded.generate("the cat", SamplingParams(max_tokens=8))[0]
    assert len(result.token_ids) <= 8
    with pytest.raises(InputError, match="quantization: expected one of int8, not 'int3'"):
        LLM(folder, quantization="int3")
    with pytest.raises(InputError, match="kv_cache_dtype: expected None or 'int8', not 'fp8'"):
        LLM(folder, kv_cache_dtype="fp8")
    with pytest.raises(InputError, match="'ragged' reads no int8 cache"):
        LLM(folder, kv_cache_dtype="int8", attention="ragged")
