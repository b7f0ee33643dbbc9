"""The step here and the step in PyTorch are the same step."""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import pytest

from tests.examples.training import BLOCK, TINY, packed, random_sample, tiny_transformer
from train.bench import step
from train.bench.__main__ import main
from train.bench.step import StepsDiffer, check_agreement, compare_step, random_rows, steps_of
from wedlm_jax.benchmark import Bar
from wedlm_jax.corruption import PackedRows
from wedlm_jax.errors import InputError


def some_rows() -> PackedRows:
    """Two samples and padding; a prompt; nothing at all."""
    random = np.random.default_rng(0)
    full = [random_sample(random, 13), random_sample(random, 9, prompt=4)]
    return packed([full, [random_sample(random, 20, prompt=6)], []], 32)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [{}, {"tie_word_embeddings": True, "qk_norm": False, "attention_bias": False}],
    ids=str,
)
def test_both_find_the_same_loss_and_gradients(
    changes: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(step, "BLOCK_SIZE", BLOCK)
    rivals = ["torch"]
    steps = steps_of(tiny_transformer(**changes), some_rows(), ["streams"], rivals, unroll=1)
    ours, theirs = steps["jax, streams"], steps["torch"]
    assert theirs.run() == pytest.approx(ours.run(), rel=1e-5)
    expected, found = ours.gradients(), theirs.gradients()
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = np.abs(expected[name]).max()
        assert scale > 0, name
        np.testing.assert_allclose(gradient / scale, expected[name] / scale, atol=2e-5)
    check_agreement(steps)


@dataclasses.dataclass
class Found:
    """A step that has found this."""

    loss: float
    gradient: float

    def run(self) -> float:
        return self.loss

    def gradients(self) -> dict[str, np.ndarray]:
        return {"norm": np.array([3.0, self.gradient])}


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (Found(2.0001, 4.0), "the loss is 2.0001 by b, 2 by a"),
        (Found(float("nan"), 4.0), "the loss is nan"),
        (Found(2.0, 4.1), "the gradient of norm by b is 0.02 away"),
        (Found(2.0, float("nan")), "the gradient of norm by b is nan away"),
    ],
)
def test_what_differs_is_not_timed(other: Found, says: str) -> None:
    check_agreement({"a": Found(2.0, 4.0), "b": Found(2.000001, 4.00001)})
    with pytest.raises(StepsDiffer, match=says):
        check_agreement({"a": Found(2.0, 4.0), "b": other})


@pytest.mark.full
def test_backends_take_turns_on_the_same_rows() -> None:
    model = dataclasses.replace(TINY, num_hidden_layers=1)
    [costs] = compare_step(
        [64],
        rows=2,
        backends=["streams", "dense"],
        rivals=[],
        unroll=1,
        passes=2,
        bar=Bar(),
        model=model,
    )
    assert [cost.way for cost in costs] == ["jax, streams", "jax, dense"]
    assert all(len(cost.milliseconds) == 2 and min(cost.milliseconds) > 0 for cost in costs)
    assert costs[0].loss == pytest.approx(costs[1].loss, rel=1e-5)
    assert costs[0].flops == costs[1].flops > 0
    rows = random_rows(model, 2, 64)
    assert rows.tokens.shape == (2, 64)
    assert rows.trainable.all()


def test_without_pytorch_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"wedlm-jax\[rival\]"):
        main(["--compare", "step"])


@pytest.mark.full
def test_a_compiled_rival_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(step, "BLOCK_SIZE", BLOCK)
    check_agreement(
        steps_of(tiny_transformer(), some_rows(), ["streams"], ["torch-compiled"], unroll=1)
    )
