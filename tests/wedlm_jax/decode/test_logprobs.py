"""Log-probabilities of chosen tokens and the most probable beside them, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reference.logit_options import logprobs
from wedlm_jax.decode.logprobs import as_list, empty_logprobs, token_logprobs

VOCAB = 9


@given(seed=st.integers(0, 2**16), k=st.integers(0, VOCAB))
def test_they_equal_numpy(seed, k):
    rng = np.random.default_rng(seed)
    logits = (3 * rng.normal(size=(5, VOCAB))).astype(np.float32)
    logits[:, VOCAB - 1] = -np.inf
    tokens = rng.integers(0, VOCAB - 1, 5)
    ours = token_logprobs(jnp.array(logits), jnp.array(tokens), k)
    for row in range(5):
        chosen, best = logprobs(logits[row], int(tokens[row]), k)
        assert float(ours.chosen[row]) == pytest.approx(chosen, abs=1e-5)
        assert ours.top_ids[row].tolist() == [token for token, _ in best]
        np.testing.assert_allclose(ours.top[row], [value for _, value in best], atol=1e-5)


def test_where_there_are_fewer_tokens_the_rest_is_empty():
    ours = token_logprobs(jnp.zeros((2, 3)), jnp.array([0, 2]), 5)
    assert ours.top.shape == (2, 5) == ours.top_ids.shape
    np.testing.assert_allclose(ours.top[0, :3], np.log(1 / 3), rtol=1e-6)
    assert (ours.top[:, 3:] == -np.inf).all()


def test_a_list_has_as_many_tokens_and_alternatives_as_asked_for():
    values = token_logprobs(jnp.array([[[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]]), jnp.array([[2, 2]]), 3)
    listed = as_list(values, 0, 2, 1)
    assert [[token for token, _ in one.top] for one in listed] == [[2], [0]]
    assert listed[0].logprob == listed[0].top[0][1] > listed[1].logprob
    assert as_list(values, 0, 1, 0)[0].top == []
    assert len(as_list(values, 0, 1, 0)) == 1


def test_room_has_the_shapes_of_what_it_is_for():
    room, values = empty_logprobs((2,), 2), token_logprobs(jnp.zeros((2, 4)), jnp.zeros(2, int), 2)
    for ours, theirs in zip(
        (room.chosen, room.top_ids, room.top),
        (values.chosen, values.top_ids, values.top),
        strict=True,
    ):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
