"""Windows of masks beside a frozen model: against windows run one by one, as decoding runs them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.examples.training import packed, random_sample, run_flat, tiny_transformer
from wedlm_jax.drafter import drafter_denominators, drafter_loss, draw_anchors, window_batch
from wedlm_jax.loss import LossConfig
from wedlm_jax.masks import CausalMask
from wedlm_jax.model.distillation import DISTANCES
from wedlm_jax.model.lora import LoraConfig, with_adapters

LORA = LoraConfig(rank=3, alpha=6.0, rows="masked")
LENGTH, WIDTH, COUNT = 32, 4, 5
SAMPLES = [[(10, 3), (14, 0)], [(30, 12)]]
"""For each row the length of each sample, and of its prompt."""


RANDOM = np.random.default_rng(0)
ROWS, _, _ = packed([[random_sample(RANDOM, *one) for one in row] for row in SAMPLES], LENGTH)
POSITIONS = np.asarray(ROWS.positions)


def drafter():
    """A model whose adapters do something."""
    graph, adapters, rest = nnx.split(
        with_adapters(tiny_transformer(), LORA, nnx.Rngs(params=2)), nnx.LoRAParam, ...
    )
    random = np.random.default_rng(1)
    draw = lambda x: jnp.asarray(random.normal(size=x.shape) / 2, x.dtype)  # noqa: E731
    return nnx.merge(graph, jax.tree.map(draw, adapters), rest)


def batch(count=COUNT):
    keys = jax.random.split(jax.random.key(3), len(SAMPLES))
    return window_batch(ROWS, jax.vmap(partial(draw_anchors, count=count))(keys, ROWS), WIDTH)


def windows_alone(model, one):
    """For each window ``[n, W, D]`` the hidden states of its masks, and of the text's rows one
    place earlier. What stands behind a window does not matter to it."""
    texts, known = [], []
    for row, anchor, _ in windows_of(one):
        start = anchor - int(POSITIONS[row, anchor])
        texts.append(jnp.roll(ROWS.tokens[row], -start))
        known.append(anchor - start)
    tokens, first = jnp.stack(texts), jnp.array(known)[:, None]
    is_mask = jnp.arange(LENGTH) >= first
    run = jax.vmap(run_flat, in_axes=(None, 0, 0))
    at = (first + jnp.arange(WIDTH))[..., None]

    def taken(hidden, at):
        return jnp.take_along_axis(hidden, at, axis=1, mode="clip")

    return taken(run(model, tokens, is_mask), at), taken(run(model, tokens, is_mask < 0), at - 1)


def windows_of(one):
    """Row, anchor and length of each window that is there."""
    before = np.asarray(one.mask.before)
    segments = np.asarray(one.mask.segments).reshape(len(SAMPLES), -1, WIDTH)
    return [
        (row, int(before[row, number]), int((segments[row, number] > 0).sum()))
        for row in range(len(SAMPLES))
        for number in range(segments.shape[1])
        if segments[row, number, 0]
    ]


def test_anchors_are_trainable_tokens_behind_text_and_all_are_drawn():
    usable = np.asarray(ROWS.trainable & (ROWS.positions > 0))
    for row, one in enumerate(usable):
        rows = jax.tree.map(lambda x, row=row: x[row], ROWS)
        every = np.asarray(draw_anchors(jax.random.key(0), rows, LENGTH))
        assert every[: one.sum()].tolist() == np.flatnonzero(one).tolist()
        assert (every[one.sum() :] == LENGTH).all()
    drawn = [draw_anchors(jax.random.key(seed), rows, 3) for seed in range(60)]
    counts = np.bincount(np.concatenate(drawn), minlength=LENGTH)
    assert (counts[usable[1]] > 0).all()
    assert counts[~usable[1]].sum() == 0


def test_masks_are_those_of_decoding_and_the_text_is_the_models_own():
    model, one = drafter(), batch()
    hidden = jax.jit(lambda model, one: model(one.token_ids, one.positions, one.mask))(model, one)
    memory = ROWS.tokens, ROWS.positions, CausalMask(ROWS.segment_ids)
    text = jax.jit(lambda model: model(*memory, attention="dense"))(tiny_transformer())
    there = np.asarray(ROWS.segment_ids) > 0
    np.testing.assert_allclose(hidden[:, :LENGTH][there], text[there], atol=1e-5)
    assert {length for *_, length in windows_of(one)} > {WIDTH}, "some end with their text"
    assert one.has_target.sum() == sum(length - 1 for *_, length in windows_of(one))
    number = dict.fromkeys(range(len(SAMPLES)), 0)
    of_windows = zip(windows_of(one), *windows_alone(model, one), strict=True)
    for (row, anchor, length), masks, teacher in of_windows:
        at = LENGTH + number[row] * WIDTH
        earlier = text[row, anchor - 1 : anchor - 1 + length]
        np.testing.assert_allclose(hidden[row, at : at + length], masks[:length], atol=2e-5)
        np.testing.assert_allclose(teacher[:length], earlier, atol=2e-5)
        has_target = one.has_target[row, at - LENGTH : at - LENGTH + length]
        np.testing.assert_array_equal(has_target, np.arange(length) > 0)
        number[row] += 1


# Of teacher's and student's probabilities, and the tokens of the text.
FORMULAS = {
    "tv": lambda p, q, _: 0.5 * jnp.abs(p - q).sum(-1),
    "kl": lambda p, q, _: (p * jnp.log(p / q)).sum(-1),
    "ce": lambda _, q, text: -jnp.log(jnp.take_along_axis(q, text[..., None], -1))[..., 0],
}


def reference(model, one, distance):
    """The loss and the tokens per forward, window by window from whole logits."""
    masks, teachers = windows_alone(model, one)
    p, q = (jax.nn.softmax(model.logits(x)) for x in (jax.lax.stop_gradient(teachers), masks))
    overlap = jax.lax.stop_gradient(jnp.minimum(p, q).sum(-1))
    hit = q.argmax(-1) == p.argmax(-1)
    total, runs, windows = jnp.zeros(()), jnp.zeros(()), 0
    for n, (row, anchor, length) in enumerate(windows_of(one)):
        windows += length > 1
        for k in range(1, length):
            loss = FORMULAS[distance](p[n, k], q[n, k], ROWS.tokens[row, anchor + k])
            total += overlap[n, 1:k].prod() * loss
            runs += hit[n, 1 : k + 1].prod()
    return total / windows, 1 + runs / windows


@pytest.mark.parametrize("distance", DISTANCES)
def test_loss_and_gradients_are_those_of_windows_alone(distance):
    one = batch()
    graph, adapters, rest = nnx.split(drafter(), nnx.LoRAParam, ...)
    config = LossConfig(chunk=7)
    denominators = drafter_denominators(one)

    def packed_loss(adapters):
        model = nnx.merge(graph, adapters, rest)
        return drafter_loss(model, one, denominators, config, distance=distance)

    def loss_alone(adapters):
        return reference(nnx.merge(graph, adapters, rest), one, distance)

    (loss, shares), ours = jax.jit(jax.value_and_grad(packed_loss, has_aux=True))(adapters)
    (expected, tokens), theirs = jax.jit(jax.value_and_grad(loss_alone, has_aux=True))(adapters)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(shares["tokens_per_forward"], tokens, rtol=1e-5)
    for (path, a), (_, b) in zip(ours.flat_state(), theirs.flat_state(), strict=True):
        np.testing.assert_allclose(a[...], b[...], atol=2e-5, err_msg=str(path))
        assert np.abs(b[...]).max() > 1e-6, path


def test_micro_batches_add_up_to_the_batch():
    one, model = batch(), drafter()
    totals = drafter_denominators(one)
    share = jax.jit(partial(drafter_loss, config=LossConfig(), distance="tv"))
    whole, shares = share(model, one, totals)
    rows = [jax.tree.map(lambda x, row=row: x[row : row + 1], one) for row in range(len(SAMPLES))]
    parts = [share(model, row, totals) for row in rows]
    np.testing.assert_allclose(sum(loss for loss, _ in parts), whole, rtol=1e-5)
    for name, value in shares.items():
        np.testing.assert_allclose(sum(more[name] for _, more in parts), value, rtol=1e-5)
