"""The kernels of decode windows equal the dense form, and look at live blocks alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from tests.absent_gpu import on_a_gpu_that_is_not_here
from tests.decode_examples import TINY
from tests.jaxpr_shapes import shapes_in
from wedlm_jax import batch as batch_module
from wedlm_jax import programs
from wedlm_jax.attention import attend, ragged, ragged_triton, window_implementation
from wedlm_jax.attention.ragged_triton import attend_ragged_triton
from wedlm_jax.cache import LayerCache
from wedlm_jax.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.masks import CachedMask, CausalMask
from wedlm_jax.model import Transformer
from wedlm_jax.row_result import RowResult
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.sharding import make_mesh

SIZE, BLOCK, LAYERS, KV_HEADS, HEAD_DIM = 48, 16, 2, 2, 16
EDGES = [0, 1, 15, 16, 17, 32, 33, 48]

Arrays = tuple[np.ndarray, ...]


@pytest.fixture(autouse=True, scope="module")
def kernels_in_python() -> Iterator[None]:
    """The kernel then runs here, and a cache of 48 rows makes three blocks."""
    with pytest.MonkeyPatch.context() as patch:
        small = partial(ragged.attend_ragged, block=BLOCK, interpret=True)
        patch.setattr(ragged, "attend_ragged", small)
        # Three blocks for two programs: two and one.
        small = partial(attend_ragged_triton, block=BLOCK, shares=2, interpret=True)
        patch.setattr(ragged_triton, "attend_ragged_triton", small)
        yield


kernels = pytest.mark.parametrize("kernel", ["ragged", "ragged_triton"])


def window(slots: int, groups: int, dtype: str = "float32") -> Arrays:
    """Queries ``[B, T, H, h]``, keys and values of the window and of a cache of two layers."""
    rng, rows = np.random.default_rng(slots), len(EDGES)
    own, before = (rows, KV_HEADS, slots, HEAD_DIM), (LAYERS, rows, KV_HEADS, SIZE, HEAD_DIM)
    shapes = [(rows, slots, KV_HEADS * groups, HEAD_DIM), own, own, before, before]
    return tuple(rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)


@partial(jax.jit, static_argnames="implementation")
def run(arrays: Arrays, lengths: np.ndarray, *, implementation: str) -> jax.Array:
    """Attention of the window over layer 1 of the cache."""
    q, k, v, *cache = arrays
    return attend(
        q, k, v, CachedMask(lengths), cache=LayerCache(*cache, jnp.int32(1)),
        implementation=implementation,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("slots", "groups", "dtype"),
    [
        (1, 4, "bfloat16"),
        (3, 1, "float32"),
        (5, 4, "float32"),
        (50, 3, "float32"),
        (50, 3, "bfloat16"),
    ],
)
@kernels
def test_the_kernel_equals_dense_at_the_edges_of_blocks(
    kernel: str, slots: int, groups: int, dtype: str
) -> None:
    arrays, lengths = window(slots, groups, dtype), np.array(EDGES)
    out = run(arrays, lengths, implementation=kernel)
    assert out.dtype == dtype
    exact = [x.astype(np.float32) for x in arrays]
    dense = run(tuple(exact), lengths, implementation="dense")
    # As in test_attention: in bfloat16 the weights and the result are rounded to 8 bits.
    rounding = 2e-6 if dtype == "float32" else 3 * 2**-8
    np.testing.assert_allclose(np.asarray(out, np.float32), dense, atol=rounding)


@kernels
@given(lengths=st.lists(st.integers(0, SIZE), min_size=8, max_size=8))
def test_the_kernel_equals_dense_for_any_lengths(kernel: str, lengths: list[int]) -> None:
    arrays = window(3, 1)
    own, dense = (run(arrays, np.array(lengths), implementation=x) for x in (kernel, "dense"))
    np.testing.assert_allclose(own, dense, atol=2e-6)


@kernels
def test_dead_blocks_and_other_layers_are_never_looked_at(kernel: str) -> None:
    arrays, lengths = window(5, 4), np.array(EDGES)
    expected = run(arrays, lengths, implementation=kernel)
    dead = np.arange(SIZE) // BLOCK >= -(-lengths[:, None] // BLOCK)
    layer_0 = np.arange(LAYERS)[:, None, None, None, None] == 0
    poison = layer_0 | dead[:, None, :, None]
    poisoned = [np.where(poison, np.float32(np.nan), x) for x in arrays[3:]]
    out = run((*arrays[:3], *poisoned), lengths, implementation=kernel)
    np.testing.assert_array_equal(out, expected)
    assert np.isnan(run((*arrays[:3], *poisoned), lengths, implementation="dense")).any()


@kernels
def test_on_a_mesh_each_device_runs_the_kernel_on_its_own_rows_and_heads(kernel: str) -> None:
    arrays, lengths = window(3, 1), np.array(EDGES)
    expected = run(arrays, lengths, implementation="dense")
    with jax.set_mesh(make_mesh({"data": 2, "tensor": 2}, jax.devices()[:4])):
        out = run(arrays, lengths, implementation=kernel)
    assert len(out.sharding.device_set) == 4
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("size", "row_bytes", "expected"),
    [
        (2048, 256, 1024),  # 8B on 8 chips: one KV head of 128 in bfloat16
        (1536, 256, 512),
        (2048, 8 * 256, 128),  # the same on one chip: eight
        (96, 256, 32),
        (2048, 2**20, 128),
    ],
)
def test_a_block_divides_the_cache_and_holds_about_as_much(
    size: int, row_bytes: int, expected: int
) -> None:
    assert ragged.block_rows(size, row_bytes) == expected


def test_a_cache_that_blocks_cannot_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="multiple of 16 rows, not 40"):
        ragged.block_rows(40, 256)


def test_without_a_cache_there_is_no_ragged_form() -> None:
    q, k, v, *_ = map(jnp.asarray, window(3, 1))
    with pytest.raises(ValueError, match="'ragged': not in"):
        attend(q, k, v, CausalMask(), implementation="ragged")


def test_tpus_take_the_kernel_where_heads_fill_a_vector() -> None:
    assert window_implementation("tpu", 128) == "ragged"
    assert window_implementation("tpu", 64) == "dense"
    assert window_implementation("gpu", 128) == window_implementation("cpu", 128) == "dense"


@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "slots", "size"),
    [(1, 32, 8, 20, 8192), (64, 32, 8, 20, 1536), (8, 28, 4, 64, 4096), (128, 16, 8, 1, 768)],
)
def test_the_kernel_for_gpus_lowers_at_real_shapes(
    rows: int, heads: int, kv_heads: int, slots: int, size: int
) -> None:
    def forward(q: jax.Array, k: jax.Array, cache: jax.Array, lengths: jax.Array) -> jax.Array:
        grouped = q.reshape(rows, kv_heads, heads // kv_heads, slots, 128)
        layer = LayerCache(cache, cache, jnp.int32(3))
        return attend_ragged_triton(grouped, k, k, layer, lengths)

    def of(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    cache = of(36, rows, kv_heads, size, 128)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    shapes = of(rows, heads, slots, 128), of(rows, kv_heads, slots, 128), cache, lengths
    with on_a_gpu_that_is_not_here():
        traced = jax.jit(forward).trace(*shapes)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 1
    assert cache.shape[1:] not in set(shapes_in(traced.jaxpr.jaxpr)), "no layer is cut out"


def test_a_gpu_is_filled_by_sharing_long_rows_out() -> None:
    assert ragged_triton._shares(8, 128) == 32, "one row of 8,192: four blocks each"
    assert ragged_triton._shares(64, 24) == 5
    assert ragged_triton._shares(512, 24) == 1
    assert ragged_triton._shares(1, 2) == 1


def test_heads_that_a_gpu_s_tiles_do_not_fit_are_refused() -> None:
    q, k, cache = (
        jnp.zeros((1, 1, 1, 2, 80)),
        jnp.zeros((1, 1, 2, 80)),
        jnp.zeros((1, 1, 1, 16, 80)),
    )
    with pytest.raises(InputError, match="takes heads of 16, 32, 64, 128, not 80"):
        attend_ragged_triton(q, k, k, LayerCache(cache, cache, jnp.int32(0)), jnp.zeros(1, int))


# --- in the model and the engine -----------------------------------------------------------


def test_no_layer_s_cache_is_copied_out_of_the_stack(tiny_model: Transformer) -> None:
    graph, parameters = nnx.split(tiny_model)
    rows, size = 3, 64
    cache_shape = (TINY.num_hidden_layers, rows, 1, size, TINY.head_dim)

    def shapes(attention: str) -> set[tuple[int, ...]]:
        def forward(parameters: nnx.State, cache: tuple[jax.Array, jax.Array]) -> jax.Array:
            tokens, positions = jnp.ones((rows, 5), int), jnp.tile(jnp.arange(5), (rows, 1))
            mask = CachedMask(jnp.array([0, 3, 60]))
            model = nnx.merge(graph, parameters)
            return model(tokens, positions, mask, cache=cache, attention=attention)[0]

        empty = jax.ShapeDtypeStruct(cache_shape, jnp.float32)
        return set(shapes_in(jax.make_jaxpr(forward)(parameters, (empty, empty)).jaxpr))

    assert cache_shape[1:] in shapes("dense")
    assert cache_shape[1:] not in shapes("ragged")


PROMPTS = [[5, 6, 7], [9], list(range(2, 22)), [3, 4]]
PARAMS = [
    SamplingParams(max_tokens=n, temperature=t, seed=i, entropy_threshold=1.6)
    for i, (n, t) in enumerate([(18, 0.0), (3, 0.0), (20, 0.0), (12, 0.8)])
]


def decoded(engine: Engine) -> list[RowResult]:
    batch = engine.start(PROMPTS, PARAMS, windows=[2, 1, 2, 2])
    assert batch.advance()
    return batch.results()


@pytest.fixture(scope="module")
def wider_model() -> Transformer:
    """With heads that the kernel for GPUs takes."""
    return Transformer(dataclasses.replace(TINY, head_dim=16), rngs=nnx.Rngs(7))


@kernels
def test_decoding_with_the_kernel_gives_the_same_tokens(
    wider_model: Transformer, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = decoded(Engine(wider_model, window_size=2))
    # However short the live part that is read at once could be: lengths are the kernel's to see.
    monkeypatch.setattr(batch_module, "SMALLEST_LIVE", 16)
    monkeypatch.setattr(batch_module, "LOOKAHEAD", 8)
    engine = Engine(wider_model, window_size=2, attention=kernel)
    assert decoded(engine) == expected
    loops = [key for key in engine._programs if key[0] is programs.advance_state]
    assert len(loops) == 1


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "atol"), [("bfloat16", 2e-2), ("float32", 1e-4)])
@pytest.mark.parametrize("slots", [1, 20, 64])
def test_on_a_gpu_the_kernel_equals_dense(dtype: str, atol: float, slots: int) -> None:
    """Compiled, not interpreted. `JAX_PLATFORMS=cuda pytest -k on_a_gpu` runs it."""
    rng, lengths = np.random.default_rng(0), np.array([0, 1, 63, 64, 65, 1000, 2048])
    own, before = (7, 2, slots, 128), (2, 7, 2, 2048, 128)
    shapes = [(7, slots, 8, 128), own, own, before, before]
    arrays = tuple(rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes)
    grouped = jnp.asarray(arrays[0]).reshape(7, slots, 2, 4, 128).transpose(0, 2, 3, 1, 4)
    layer = LayerCache(*map(jnp.asarray, arrays[3:]), jnp.int32(1))
    out = jax.jit(attend_ragged_triton)(grouped, *arrays[1:3], layer, lengths)
    out = out.transpose(0, 3, 1, 2, 4).reshape(shapes[0])
    with jax.default_matmul_precision("highest"):
        expected = run(arrays, lengths, implementation="dense")
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (out, expected)), atol=atol)


def test_an_engine_refuses_an_attention_that_there_is_not(tiny_model: Transformer) -> None:
    with pytest.raises(
        InputError, match="attention: expected one of dense, ragged, ragged_triton, not"
    ):
        Engine(tiny_model, attention="splash")
