"""The step here and the step in PyTorch are the same; backends of attention, timed."""

import dataclasses
import json
import sys

import numpy as np
import pytest

from benchmarks import attention, step
from benchmarks.step import (
    BLOCK_SIZE,
    SAMPLES,
    StepsDiffer,
    check_agreement,
    conversations,
    main,
    random_rows,
    steps_of,
    timed_by_turns,
)
from tests.examples.child import run_python
from tests.examples.train_step import assert_same_gradients
from tests.examples.training import BLOCK, TINY, packed, random_sample, tiny_transformer
from wedlm_jax.errors import InputError


def some_rows():
    """Two samples and padding; a prompt; nothing at all."""
    random = np.random.default_rng(0)
    full = [random_sample(random, 13), random_sample(random, 9, prompt=4)]
    return packed([full, [random_sample(random, 20, prompt=6)], []], 32)[0]


@pytest.mark.full
@pytest.mark.parametrize(
    ("rival", "changes"),
    [
        ("torch", {}),
        ("torch", {"tie_word_embeddings": True, "qk_norm": False, "attention_bias": False}),
        ("torch-compiled", {}),
    ],
    ids=str,
)
def test_both_find_the_same_loss_and_gradients(rival, changes, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setattr(step, "BLOCK_SIZE", BLOCK)
    model = tiny_transformer(**changes)
    steps = steps_of(model, {"jax": some_rows()}, ["streams"], [rival], unroll=1)
    ours, theirs = steps["jax, streams"], steps[rival]
    assert theirs.run() == pytest.approx(ours.run(), rel=1e-5)
    assert theirs.gradients().keys() == ours.gradients().keys()
    assert_same_gradients(theirs.gradients(), ours.gradients())
    check_agreement(steps)


@dataclasses.dataclass
class Found:
    """A step that has found this."""

    loss: float
    gradient: float
    flops: float = 1.0

    def run(self):
        return self.loss

    def gradients(self):
        return {"norm": np.array([3.0, self.gradient])}


def test_what_differs_is_not_timed(monkeypatch, capsys):
    good = Found(2.0, 4.0)
    check_agreement({"a": good, "b": Found(2.000001, 4.00001)})
    for other, says in (
        (Found(2.0001, 4.0), "the loss is 2.0001 with b, 2 with a"),
        (Found(float("nan"), 4.0), "the loss is nan"),
        (Found(2.0, 4.1), "the gradient of norm differs by 0.02 between b and a"),
        (Found(2.0, float("nan")), "the gradient of norm differs by nan between b and a"),
    ):
        with pytest.raises(StepsDiffer, match=says):
            check_agreement({"a": good, "b": other})
        monkeypatch.setattr(step, "steps_of", lambda *_, b=other, **__: {"a": good, "b": b})
        monkeypatch.setattr(step, "SHAPE", TINY)
        assert main(["--lengths", "32", "--rival"]) == 1
        assert capsys.readouterr().err.endswith("; nothing was timed\n")


def test_half_of_the_rows_blocks_are_left_out():
    length = SAMPLES * 2 * BLOCK_SIZE
    whole, few = conversations(TINY, rows=2, length=length, share=0.5).values()
    assert whole.prediction_blocks is None
    assert random_rows(TINY, 2, 64).trainable.all()
    assert np.asarray(few.prediction_blocks).tolist() == [[1, 3, 5, 7]] * 2
    assert np.asarray(few.trainable).sum() == length
    np.testing.assert_array_equal(few.tokens, whole.tokens)


@pytest.mark.full
def test_with_and_without_prompts_agree_and_are_measured():
    length = SAMPLES * 2 * BLOCK_SIZE
    packed = conversations(TINY, 1, length, 0.5)
    steps = steps_of(tiny_transformer(), packed, ["streams"], [], unroll=1)
    whole, few = timed_by_turns(steps, 2, "")
    assert (whole["way"], few["way"]) == ("all blocks, streams", "prompts left out, streams")
    assert float(whole["loss"]) == pytest.approx(float(few["loss"]), rel=1e-5)
    assert len(whole["ms"]) == len(few["ms"]) == 2
    assert few["GFLOP"] < whole["GFLOP"]


def test_without_pytorch_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(InputError, match=r"wedlm-jax\[rival\]"):
        main([])


@pytest.mark.full
def test_backends_of_attention(tmp_path, capsys):
    output = tmp_path / "attention.json"
    arguments = "--lengths 64 128 --time-up-to 64 --heads 4 --head-dim 8 "
    arguments += f"--attention dense streams --passes 2 --output {output}"
    assert attention.main(arguments.split()) == 0
    costs = json.loads(output.read_text())["attention"]
    assert [(cost["way"], cost["length"]) for cost in costs] == [
        ("dense", 64),
        ("streams", 64),
        ("dense", 128),
        ("streams", 128),
    ]
    assert [len(cost["ms"]) for cost in costs] == [2, 2, 0, 0]
    # Forward two products over all pairs, backward four.
    dense, streams = costs[2:]
    assert dense["GFLOP"] * 1e9 == 6 * 2 * 4 * 8 * (2 * 128) ** 2
    assert streams["GFLOP"] < dense["GFLOP"]
    assert 0 < streams["memory, MiB"] < dense["memory, MiB"]
    assert "4 heads of 8, 2 KV heads, float32" in capsys.readouterr().out


@pytest.mark.full
def test_as_a_command_a_refusal_is_a_sentence_and_status_2():
    done = run_python("-m", "benchmarks.attention", "--lengths", "100")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "python -m benchmarks.attention: --lengths: expected multiples of 32, not 100\n"
    )
