"""What a machine's constants are made of, and what they predict."""

import jax.numpy as jnp
import numpy as np
import pytest

import infer.bench.constants
from infer.bench.constants import Constants, by_products, constants_table, measure, products
from infer.bench.subject import load_subject
from wedlm_jax.engine.interface import Request
from wedlm_jax.params import SamplingParams

TWO = Constants([1, 16], [2.0, 5.0], weight_bytes=10**7, flops_per_token=10**7, empty_burst=0.4)


@pytest.fixture(scope="module")
def subject(checkpoint):
    return load_subject({"model": str(checkpoint), "dtype": "float32"})


def test_the_products_are_those_of_the_layers(subject):
    """One turn against the same products in NumPy."""
    y = x = np.linspace(-0.1, 0.1, 3 * 32, dtype=np.float32).reshape(3, 32)

    def through(x, *linears):
        return [x @ np.asarray(linear.weight[...]).T for linear in linears]

    for layer in subject.model.layers:
        a, mlp = layer.self_attn, layer.mlp
        q, k, v = through(y, a.q_proj, a.k_proj, a.v_proj)
        y = y + through(q + np.tile(k + v, (1, 2)), a.o_proj)[0]
        gate, up = through(y, mlp.gate_proj, mlp.up_proj)
        y = y + through(gate / (1 + np.exp(-gate)) * up, mlp.down_proj)[0]
    zeros = jnp.zeros((3, subject.config.vocab_size))
    engine = subject.engine(0, 1)
    logits = engine.run_model(products, jnp.asarray(x), zeros, jnp.int32(1))
    np.testing.assert_allclose(
        logits, y @ np.asarray(subject.model.head_matrix()).T, rtol=2e-4, atol=2e-5
    )


def test_constants_are_measured_with_the_weights(subject, monkeypatch):
    monkeypatch.setattr(infer.bench.constants, "TOKENS", (1, 4, 8))
    engine = subject.engine(0, 2)
    engine.decode([Request(0, [5, 9, 6], SamplingParams(mode="ar", max_tokens=2))])
    found = measure(engine)
    config = subject.config
    layers = sum(
        linear.weight.size
        for layer in subject.model.layers
        for block in (layer.self_attn, layer.mlp)
        for linear in vars(block).values()
        if hasattr(linear, "weight") and linear.weight.ndim == 2
    )
    head = config.vocab_size * config.hidden_size
    # Norms, which are no matrices, are counted with the layers: a few numbers.
    assert 0 <= found.flops_per_token / 2 - (layers + head) < 0.02 * layers
    assert found.weight_bytes == 2 * found.flops_per_token, "four bytes, two operations"
    assert found.tokens == [1, 4, 8]
    assert min(found.milliseconds) > 0
    assert found.empty_burst > 0
    assert engine.scheduler.is_running is False
    # Products that would take too long are left out.
    monkeypatch.setattr(infer.bench.constants, "LONGEST", 0.0)
    assert measure(engine).tokens == [1]


def test_times_lie_on_lines_between_those_measured_and_give_rates():
    assert TWO.of(1) == 2
    assert TWO.of(6) == pytest.approx(3)
    assert TWO.of(31) == pytest.approx(8), "and beyond the last"
    # 100 forwards of a token, and 20 of 16: 200 ms against 100.
    assert by_products(TWO, (20, 320), (100, 100)) == pytest.approx(2)
    assert by_products(TWO, (100, 100), (100, 100)) == 1
    columns = {one.header: list(one.cells) for one in constants_table(TWO).columns}
    assert columns["GB/s of weights"] == ["5.00", "2.00"]
    assert columns["GFLOP/s"] == ["5.00", "32.0"]
