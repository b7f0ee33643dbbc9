"""Static sizes of a forward: few, none too small, and chosen without a copy of what is carried."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.forward_sizes import usual_sizes
from wedlm_jax.decode.spans import ForwardSizes, at_size, in_parts
from wedlm_jax.decode.spans import forward_sizes as sizes_of
from wedlm_jax.decode.state import num_slots


def forward_sizes(*arguments, **options):
    with usual_sizes():
        return sizes_of(*arguments, **options)


def filled_up(sizes, tokens):
    whole, rest = divmod(tokens, sizes.tokens[-1])
    return whole * sizes.tokens[-1] + min((s for s in sizes.tokens if s >= rest > 0), default=0)


@settings(max_examples=4 * settings.default.max_examples)
@given(
    sequences=st.sampled_from([1, 2, 3, 4, 8, 31, 128, 1024]),
    window=st.integers(0, 32),
    chunk=st.sampled_from([1, 8, 256, 1024]),
    largest=st.sampled_from([64, 128, 1024]),
)
def test_every_forward_has_a_size(sequences, window, chunk, largest):
    sizes = forward_sizes(sequences, window, chunk, largest)
    assert sizes.total == sequences * num_slots(window) + chunk
    assert sizes.tokens[-1] == min(sizes.total, largest)
    assert list(sizes.tokens) == sorted(set(sizes.tokens))
    assert list(sizes.head) == sorted(set(sizes.head))
    assert sizes.head[-1] <= 256
    assert len(sizes.tokens) <= 16, "each is compiled"
    needed = np.unique(np.linspace(1, sizes.total, 50, dtype=np.int32))
    computed = np.array([filled_up(sizes, int(tokens)) for tokens in needed])
    assert (computed >= needed).all()
    # Of large forwards a third is padding at most, but for one sequence's.
    if sequences > 1:
        assert (computed <= np.maximum(2 * needed, window)).all()
        large = needed >= 128
        assert (computed[large] <= 1.5 * needed[large] + 1).all()


@pytest.mark.parametrize("window", [2, 3, 8, 14, 15, 16, 32])
@pytest.mark.parametrize("narrower", [False, True])
@pytest.mark.parametrize("whole", [4, 16])
def test_windows_of_one_sequence_fill_the_columns_of_a_product(window, narrower, whole):
    sizes = forward_sizes(1, window, 256, 256, narrower=narrower, whole=whole)
    assert all(size % whole == 0 and size != 28 for size in sizes.tokens[1:])
    assert set(sizes.head) <= set(sizes.tokens)
    # Windows with nothing and with everything filled are padded by little.
    for slots in (window + 1, num_slots(window)):
        assert filled_up(sizes, slots) - slots <= whole


@pytest.mark.parametrize(("sequences", "window"), [(1, 4), (4, 4), (16, 16), (300, 16), (8, 0)])
def test_a_deterministic_engine_has_one(sequences, window):
    sizes = forward_sizes(sequences, window, 256, 512, one_size=True)
    assert len(sizes.tokens) == len(sizes.head) == 1
    # Windows of all sequences usually pass at once.
    assert sizes.tokens[0] >= min(sequences * (window + 1), 512)


SIZES = (2, 4, 8)


def test_parts_cover_what_is_needed_in_order():
    sizes = ForwardSizes(SIZES, SIZES, 24)

    @jax.jit
    def run(needed):
        def step(size, start, out):
            turn = out.max() + 1
            return jax.lax.dynamic_update_slice(out, jnp.full(size, turn), (start,))

        return in_parts(SIZES, needed, step, jnp.zeros(24 + SIZES[-1], jnp.int32))

    for needed in range(25):
        parts, computed = np.asarray(run(jnp.int32(needed))), filled_up(sizes, needed)
        assert sizes.filled_up(jnp.int32(needed)) == computed
        assert (parts[:needed] == 1 + np.arange(needed) // 8).all()
        assert np.count_nonzero(parts) == computed
        assert (parts[computed:] == 0).all()


def test_what_is_carried_is_updated_in_place():
    """A `lax.switch` would copy it: the cache, at every forward."""

    def run(pool, needed):
        def step(size, pool):
            return jax.lax.dynamic_update_slice(pool, jnp.ones(size), (needed,))

        def forward(carry):
            return carry[0] + 1, at_size(SIZES, needed, step, carry[1])

        return jax.lax.while_loop(lambda c: c[0] < 3, forward, (jnp.int32(0), pool))[1]

    pool = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    lowered = jax.jit(run, donate_argnums=0).lower(pool, jnp.int32(3))
    memory = lowered.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 1 << 16
