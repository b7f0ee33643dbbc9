"""The losses equal those of whole logits, packed or not, forward and backward."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.train_step import assert_same_gradients
from tests.examples.training import (
    BLOCK,
    MASK_TOKEN,
    MatrixMask,
    packed,
    random_sample,
    tiny_transformer,
)
from tests.reference.training import dual_streams, wedlm_losses
from wedlm_jax.corruption import dual_stream, sample_masks
from wedlm_jax.loss import (
    SURPRISE,
    LossConfig,
    ar_denominators,
    ar_loss,
    head_chunks,
    wedlm_denominators,
    wedlm_loss,
)

ROW_LENGTH = 32


@pytest.fixture(scope="module")
def model_parts():
    return nnx.split(tiny_transformer())


@pytest.fixture(scope="module")
def packed_loss(model_parts):
    """Metrics and gradients of packed rows, compiled once for each shape and weighting."""
    graph, parameters = model_parts

    @partial(jax.jit, static_argnames=("config",))
    def run(rows, masked, ratio, config):
        batch = dual_stream(rows, masked, ratio, block_size=BLOCK, mask_token_id=MASK_TOKEN)
        denominators = wedlm_denominators(batch, config)

        def total(parameters):
            loss, shares = wedlm_loss(nnx.merge(graph, parameters), batch, denominators, config)
            return loss, {"loss": loss, **shares}

        return jax.grad(total, has_aux=True)(parameters)

    return run


@pytest.fixture(scope="module")
def whole_logits(model_parts):
    """Logits ``[2n, V]`` of one sample's streams under the reference's own 0/1 matrix."""
    graph, parameters = model_parts

    @jax.jit
    def forward(token_ids, positions, matrix):
        model = nnx.merge(graph, parameters)
        hidden = model(token_ids, positions, MatrixMask(matrix=matrix), attention="dense")
        return model.logits(hidden)

    def logits(sample):
        streams = dual_streams(sample, BLOCK, MASK_TOKEN)
        # Behind the streams stand rows that nothing sees, so that one shape serves all.
        size, room = len(streams.token_ids), 2 * ROW_LENGTH
        ids, positions = np.zeros((2, 1, room), np.int32)
        matrix = np.zeros((1, room, room), bool)
        ids[0, :size], positions[0, :size] = streams.token_ids, streams.positions
        matrix[0, :size, :size] = streams.matrix
        return np.asarray(forward(ids, positions, matrix))[0, :size]

    return logits


def random_rows(seed, lengths):
    random = np.random.default_rng(seed)
    return [
        [random_sample(random, length, prompt=int(random.integers(0, length))) for length in row]
        for row in lengths
    ]


def partly_predicted(sample, whole_logits):
    """The sample with the model's own predictions at the masks of its last block, where no other
    row of the prediction stream sees them: so that some are right."""
    length = len(sample.tokens)
    streams = dual_streams(sample, BLOCK, MASK_TOKEN)
    predicted = whole_logits(sample)[length:].argmax(-1)
    tokens = sample.tokens.copy()
    for row in range((length - 1) // BLOCK * BLOCK, length):
        if streams.masked[row]:
            tokens[streams.positions[length + row]] = predicted[row]
    return dataclasses.replace(sample, tokens=tokens)


def row_of_lengths(sizes):
    """As many of ``sizes`` as fit one row."""
    kept = []
    for size in sizes:
        if sum(-(-n // BLOCK) * BLOCK for n in [*kept, size]) <= ROW_LENGTH:
            kept.append(size)
    return kept


@settings(max_examples=10)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.lists(st.integers(1, 14), min_size=1, max_size=5), min_size=2, max_size=2),
    options=st.sampled_from(
        [{"weighting": "inverse_ratio", "ar_weight": 0.5}, {"weighting": "uniform"}]
    ),
)
def test_packed_rows_have_the_losses_and_accuracies_of_their_samples_alone(
    packed_loss, whole_logits, seed, sizes, options
):
    rows = random_rows(seed, [row_of_lengths(row) for row in sizes])
    rows = [[partly_predicted(sample, whole_logits) for sample in row] for row in rows]
    samples = [sample for row in rows for sample in row]
    logits = [*map(whole_logits, samples)]
    expected = wedlm_losses(samples, logits, block_size=BLOCK, **options)
    config = LossConfig(chunk=8, **options)
    _, metrics = packed_loss(*packed(rows, ROW_LENGTH), config=config)
    for name, value in expected.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-5, err_msg=name)


def test_packed_gradient_is_that_of_one_sample_a_row(packed_loss):
    samples = [sample for row in random_rows(3, [[9, 4, 13]]) for sample in row]
    together, _ = packed_loss(*packed([samples, []], ROW_LENGTH), config=LossConfig(chunk=8))
    apart, _ = packed_loss(*packed([[s] for s in samples], ROW_LENGTH), config=LossConfig(chunk=8))
    assert_same_gradients(together, apart)


def test_a_row_without_targets_changes_nothing(packed_loss):
    random = np.random.default_rng(0)
    sample, prompt_only = random_sample(random, 14, prompt=3), random_sample(random, 9, prompt=9)

    def of(*rows):
        return packed_loss(*packed(rows, ROW_LENGTH), config=LossConfig(chunk=8))

    (alone, alone_metrics), (both, metrics) = of([sample], []), of([sample], [prompt_only])
    assert float(metrics["loss"]) > 1
    for name, value in metrics.items():
        np.testing.assert_allclose(value, alone_metrics[name], rtol=1e-6, err_msg=name)
    assert_same_gradients(both, alone)
    # Alone it gives zeros.
    gradient, metrics = of([prompt_only], [])
    assert not any(np.any(value) for value in jax.tree.leaves((gradient, metrics)))


def test_ar_loss_is_the_mean_over_next_tokens_of_each_sample(model_parts, whole_logits):
    graph, parameters = model_parts
    rows = random_rows(8, [[9, 5], [14]])
    samples = [sample for row in rows for sample in row]
    for sample in samples:  # one prediction of each is right
        sample.tokens[-1] = whole_logits(sample)[len(sample.tokens) - 2].argmax()
    config = LossConfig(chunk=8)

    @jax.jit
    def run(rows):
        return ar_loss(nnx.merge(graph, parameters), rows, ar_denominators(rows), config)

    loss, metrics = run(packed(rows, ROW_LENGTH)[0])
    expected = wedlm_losses(samples, [*map(whole_logits, samples)], block_size=BLOCK)
    np.testing.assert_allclose(loss, expected["ar_loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["ar_accuracy"], expected["ar_accuracy"], atol=1e-6)


def test_unknown_weighting_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'inverse'.*inverse_ratio or uniform"):
        LossConfig(weighting="inverse")


@pytest.mark.parametrize(
    ("rows", "over", "prediction", "most", "expected"),
    [
        # 6,144 of 8,192 tokens, and up to 384 more masks on one of them.
        (128, (128, 1), 4096, 2048, (4, 1632)),
        (256, (128, 1), 4096, 2048, (7, 1840)),
        (512, (512, 1), 4096, 2048, (4, 1648)),
        (1, (1, 1), 4096, 2048, (4, 1584)),
        (4, (1, 2), 4096, 2048, (8, 2048)),  # one device has all of the memory
        # Half a prediction stream: 3,072, and up to 251 more masks; and none.
        (64, (64, 1), 2048, 2048, (2, 1664)),
        (64, (64, 1), 0, 2048, (2, 2048)),
        (64, (64, 1), 2048, 100_000, (1, 3328)),
        (64, (64, 1), 2048, 8, (416, 8)),
    ],
)
def test_the_heads_chunks_are_full_on_the_fullest_device(rows, over, prediction, most, expected):
    batch, sequence = over
    found = head_chunks(most, (rows, 4096), prediction, 32, batch=batch, sequence=sequence)
    assert found == expected


def test_no_device_of_a_pod_needs_another_chunk_in_nine_of_ten_micro_batches():
    """32 micro-batches of 128 devices, with a row each, as they are drawn."""
    length, block, devices, batches = 1024, 32, 128, 32
    rows = jnp.ones((devices, length), bool)

    @jax.jit
    def most_targets(key):
        return sample_masks(key, rows, block)[0].sum(-1).max() + length - 1

    found = [int(most_targets(jax.random.key(seed))) for seed in range(batches)]
    turns, chunk = head_chunks(512, (devices, length), length, block, batch=devices, sequence=1)
    assert np.mean(np.array(found) > turns * chunk) <= SURPRISE
    # Chunks of 512 would be one more on all, and chunks a tenth smaller would not do.
    assert turns == -(-max(found) // 512)
    assert np.mean(np.array(found) > 0.9 * turns * chunk) > SURPRISE
