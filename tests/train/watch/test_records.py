"""Numbers of several steps as one record, skipped ones among them, and what a restart needs."""

import json

import numpy as np
import pytest

from train.watch.records import Interval, PendingMetrics, TooManySkipped, flatten


def step(mlm, masked, ar, targets, **more):
    """Metrics of a step on the host."""
    counts = {
        "mlm": np.float32(masked),
        "masked": np.float32(masked),
        "ar": np.float32(targets),
        "masked_by_ratio": np.array([0, masked], np.float32),
    }
    return {
        "loss": np.float32((mlm + ar) / 2),
        "mlm_loss": np.float32(mlm),
        "ar_loss": np.float32(ar),
        "mlm_loss_by_ratio": np.array([0, mlm], np.float32),
        "gradient_norm": np.float32(1.0),
        "learning_rate": np.float32(0.5),
        "skipped": np.int32(0),
        "denominators": counts,
        **more,
    }


def test_losses_by_ratio_become_numbers_and_empty_bins_none():
    metrics = {"loss": np.float32(2), "mlm_loss_by_ratio": np.array([0.5, 0, 1, 2], np.float32)}
    assert flatten(metrics) == {
        "loss": 2.0,
        "mlm_loss_ratio_0.00_0.25": 0.5,
        "mlm_loss_ratio_0.50_0.75": 1.0,
        "mlm_loss_ratio_0.75_1.00": 2.0,
    }


def test_a_loss_is_the_mean_of_all_tokens_of_the_interval():
    interval = Interval(ar_weight=0.5)
    interval.add(step(4.0, 10, 2.0, 100, gradient_norm=np.float32(1.0)))
    interval.add(step(1.0, 30, 3.0, 300, gradient_norm=np.float32(2.0), learning_rate=0.25))
    record = interval.record()
    assert record["mlm_loss"] == (4 * 10 + 1 * 30) / 40
    assert record["mlm_loss_ratio_0.50_1.00"] == record["mlm_loss"]
    assert "mlm_loss_ratio_0.00_0.50" not in record
    assert record["ar_loss"] == (2 * 100 + 3 * 300) / 400
    assert record["loss"] == pytest.approx((record["mlm_loss"] + 0.5 * record["ar_loss"]) / 1.5)
    assert record["gradient_norm"] == 1.5  # of steps
    assert record["learning_rate"] == 0.25  # the newest
    assert record["skipped"] == 0
    assert interval.empty


def by_source(mlm, masked, tokens):
    """Metrics of a step that tells three sources apart; AR losses are twice those of masks."""
    whole = step(1.0, sum(masked), 2.0, sum(tokens))
    losses, weights, counts = (np.array(x, np.float32) for x in (mlm, masked, tokens))
    whole |= {"mlm_loss_by_source": losses, "ar_loss_by_source": 2 * losses}
    whole["denominators"] |= {
        "mlm_by_source": weights,
        "ar_by_source": counts,
        "tokens_by_source": counts,
    }
    return whole


NAMES = ["data/web", "data/code", "data/books"]


def test_losses_by_source_are_means_of_all_its_tokens_by_the_recipes_names():
    interval = Interval(sources=NAMES)
    interval.add(by_source([4, 8, 0], [10, 5, 0], [100, 50, 0]))
    interval.add(by_source([1, 0, 0], [30, 0, 0], [300, 20, 0]))  # of the code no mask
    skipped = by_source([np.nan] * 3, [1, 1, 1], [100, 100, 100])
    interval.add({**skipped, "skipped": np.int32(1)})
    record = interval.record()
    assert {name: x for name, x in record.items() if "/" in name} == {
        "mlm_loss/data/web": (4 * 10 + 1 * 30) / 40,
        "mlm_loss/data/code": 8.0,
        "ar_loss/data/web": 2 * (4 * 100 + 1 * 300) / 400,
        "ar_loss/data/code": 16 * 50 / 70,
        "tokens/data/web": 400.0,
        "tokens/data/code": 70.0,
    }
    assert interval.empty


def test_an_interval_goes_on_with_other_sources():
    first, second = Interval(sources=NAMES), Interval(sources=["data/books", "data/web"])
    first.add(by_source([4, 8, 0], [10, 5, 0], [100, 50, 0]))
    second.restore(json.loads(json.dumps(first.state())))
    second.add(by_source([2, 1], [7, 30], [70, 300]))
    record = second.record()
    assert record["mlm_loss/data/web"] == (4 * 10 + 1 * 30) / 40
    assert (record["mlm_loss/data/books"], record["mlm_loss/data/code"]) == (2.0, 8.0)
    assert record["tokens/data/web"] == 400


def test_a_skipped_step_is_counted_and_spoils_no_mean():
    interval = Interval()
    interval.add(step(4.0, 10, 2.0, 100))
    interval.add(step(np.nan, 10, np.nan, 100, gradient_norm=np.nan, skipped=np.int32(1)))
    record = interval.record()
    assert record["skipped"] == 1
    assert (record["mlm_loss"], record["gradient_norm"]) == (4.0, 1.0)
    interval.add(step(np.nan, 10, np.nan, 100, skipped=np.int32(2)))
    assert not interval.empty
    assert interval.record() == {"learning_rate": 0.5, "skipped": 1.0}


def test_an_interval_goes_on_from_its_state_bit_for_bit():
    steps = [step(np.float32(4 / 3), 7, 2.0, 11), step(0.1, 5, 0.7, 13), step(0.2, 3, 0.3, 17)]
    whole, first, second = Interval(), Interval(), Interval()
    for one in steps:
        whole.add(one)
    for one in steps[:2]:
        first.add(one)
    second.restore(json.loads(json.dumps(first.state())))
    second.add(steps[2])
    assert second.record() == whole.record()


def metrics(loss, skipped=0):
    return {
        "loss": np.float32(loss),
        "ar_loss": np.float32(loss),
        "gradient_norm": np.float32(loss),
        "skipped": np.int32(skipped),
        "denominators": {"ar": np.float32(2.0)},
    }


def pending(folder, done=0):
    return PendingMetrics(folder, 2, lambda batch: [{"file": [batch]}], done=done)


def test_all_skipped_steps_are_named_before_the_run_is_stopped(tmp_path):
    found = pending(tmp_path)
    for step, skipped in enumerate([0, 1, 2, 3], 1):
        found.add(step, metrics(float("nan") if skipped else 1.0, skipped))
    with pytest.raises(TooManySkipped, match=r"step 3: 2 steps in a row.*continues after them"):
        found.record()
    lines = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [(line["step"], line["batch"]) for line in lines] == [(2, 2), (3, 3), (4, 4)]
    assert [line["rows"] for line in lines] == [[{"file": [batch]}] for batch in (1, 2, 3)]


def test_an_interval_that_was_open_at_a_checkpoint_goes_on_from_it(tmp_path):
    first = pending(tmp_path)
    first.add(1, metrics(1.0))
    first.keep(1)
    first.add(2, metrics(5.0))
    first.keep(2)  # of a checkpoint that is damaged later
    again = pending(tmp_path, done=1)
    again.add(2, metrics(2.0))
    assert again.record()["loss"] == 1.5
    again.keep(2)  # nothing is open
    assert len((tmp_path / "interval.jsonl").read_text().splitlines()) == 1
    assert pending(tmp_path, done=2).record() == {"skipped": 0.0}
