"""A step without prompts in its prediction stream is the step with them."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples.data import CHAT, EMBEDDED, NumberedRows, step_rows, tokenised, write_jsonl
from tests.examples.tiny_run import metric_lines, run_until_killed, tiny_recipe
from tests.examples.train_step import OBJECTIVE, assert_same, gradients_of
from tests.examples.training import BLOCK, packed, random_sample
from train.automatic import (
    blocks_of_rows,
    most_trainable_blocks,
    needed_by_sources,
    with_prediction_blocks,
)
from train.data.shards import MANIFEST, read_manifest
from train.loop import train as run_training
from train.recipe.config import DataSection, PhaseSection, TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.attention import IMPLEMENTATIONS, splash
from wedlm_jax.errors import InputError
from wedlm_jax.packing import prediction_blocks

LENGTH, ROOM = 32, 6


def placed(rows, room=ROOM):
    """The same rows ``[R, L]`` with the places of their prediction blocks."""
    places = [prediction_blocks(row, BLOCK, room) for row in np.asarray(rows.trainable)]
    return dataclasses.replace(rows, prediction_blocks=jnp.asarray(np.stack(places)))


def conversation(random, *turns):
    """A sample whose turns, of these lengths, are the user's and the assistant's by turns."""
    sample = random_sample(random, sum(turns))
    trainable = np.repeat(np.arange(len(turns)) % 2 == 1, turns)
    return dataclasses.replace(sample, trainable=trainable, masked=sample.masked & trainable)


def some_batch():
    """Prompts around answers; a row that needs all the room; a prompt alone; nothing."""
    random = np.random.default_rng(3)
    several = [conversation(random, 6, 3), conversation(random, 1, 2, 9, 4)]
    fullest = [conversation(random, 5, 22, 5)]
    prompt = [conversation(random, 20)]
    return packed([several, fullest, prompt, []], LENGTH)


COSTLY = ("dense", "streams")
BACKENDS = [
    pytest.param(name, marks=[pytest.mark.full] * (name in COSTLY)) for name in IMPLEMENTATIONS
]


@pytest.mark.parametrize("attention", BACKENDS)
def test_loss_and_gradients_are_those_with_all_blocks(attention, monkeypatch):
    monkeypatch.setattr(splash, "attend_splash", partial(splash.attend_splash, interpret=True))
    rows, masked, ratio = some_batch()
    assert most_trainable_blocks(np.asarray(rows.trainable), BLOCK) == ROOM
    loss = dataclasses.replace(OBJECTIVE.loss, attention=attention)
    objective = dataclasses.replace(OBJECTIVE, loss=loss)
    whole = gradients_of(rows, masked, ratio, steps=1, objective=OBJECTIVE)
    own = gradients_of(placed(rows), masked, ratio, steps=1, objective=objective)
    assert float(whole[1]["mlm_loss"]) > 1
    assert_same(own, whole)
    in_two = gradients_of(placed(rows), masked, ratio, steps=2, objective=OBJECTIVE)
    assert_same(in_two, whole)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_any_rows_have_the_loss_and_gradients_they_have_with_all_blocks(seed):
    random = np.random.default_rng(seed)

    def row():
        samples, left = [], LENGTH
        while left > 2 * BLOCK and random.random() < 0.8:
            turns = random.integers(1, left // 4 + 1, int(random.integers(2, 5)))
            sample = conversation(random, *turns[: int(random.integers(1, 5))].tolist())
            left -= -(-len(sample.tokens) // BLOCK) * BLOCK
            if left >= 0:
                samples.append(sample)
        return samples

    rows, masked, ratio = packed([[conversation(random, 3, 9)], row(), row(), row()], LENGTH)
    # Room for all: some rows then leave nothing out, and others do.
    whole = gradients_of(rows, masked, ratio, steps=1, objective=OBJECTIVE)
    own = gradients_of(placed(rows, LENGTH // BLOCK), masked, ratio, steps=1, objective=OBJECTIVE)
    assert_same(own, whole)


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """Rows of conversations that begin with a long prompt; one has a longer answer."""
    root = tmp_path_factory.mktemp("chats")
    system = "Be brief, and say only what you were asked for, however long the question is. "

    def record(times, answer):
        head = {"role": "system", "content": system * times}
        last = {"role": "assistant", "content": "3, 2, 1. " * answer}
        return {"messages": [head, *CHAT[1:-1], last]}

    records = [record(2, 1)] * 6 + [record(1, 4)] + [record(2, 2)] * 6
    tokenised([write_jsonl(root / "chats.jsonl", records)], root / "rows", row_length=256)
    return root / "rows"


def chat_recipe(output, folder, **changes):
    data = DataSection(sources={str(folder): 1.0}, tokenizer=str(EMBEDDED))
    return tiny_recipe(output, None, data=data, row_length=256, **changes)


@pytest.mark.full
def test_a_run_leaves_prompts_out_by_itself_and_learns_the_same(chats, tmp_path, capsys):
    most = read_manifest(chats).most_trainable_blocks
    assert 1 < most < 8
    config = chat_recipe(tmp_path / "auto", chats, checkpoint_every=2)
    run_training(config)
    assert (
        f"prediction_blocks: the prediction stream has room for {most} of a row's 8 blocks\n"
        in capsys.readouterr().out
    )
    resumed = dataclasses.replace(config, output=str(tmp_path / "resumed"))
    run_until_killed(resumed, 3)
    run_training(resumed)
    assert "not as before" not in capsys.readouterr().out
    assert metric_lines(tmp_path / "resumed") == metric_lines(tmp_path / "auto")
    name = Path("hf", "model.safetensors")
    assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "auto" / name).read_bytes()
    run_training(chat_recipe(tmp_path / "all", chats, prediction_blocks=8))
    assert "the prediction stream" not in capsys.readouterr().out
    few, whole = metric_lines(tmp_path / "auto"), metric_lines(tmp_path / "all")
    assert len(few) == 4
    for own, other in zip(few, whole, strict=True):
        assert own.keys() == other.keys()
        for name in ("loss", "mlm_loss", "ar_loss", "masked_accuracy"):
            assert own[name] == pytest.approx(other[name], rel=2e-4), name


def test_a_folder_of_an_earlier_version_keeps_all_blocks_and_the_run_says_so(
    chats, tmp_path, capsys
):
    for file in chats.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    fields = json.loads((chats / MANIFEST).read_text())
    del fields["most_trainable_blocks"], fields["trainable_blocks"]
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    config = chat_recipe(tmp_path / "run", tmp_path)
    assert with_prediction_blocks(config, needed_by_sources, 1).prediction_blocks == 8
    assert "tokenise it again to leave them out" in capsys.readouterr().out
    # Where all is trained on there is nothing to leave out, nor to say.
    fields["trainable_tokens"] = fields["tokens"]
    (tmp_path / MANIFEST).write_text(json.dumps(fields))
    assert with_prediction_blocks(config, needed_by_sources, 1).prediction_blocks == 8
    assert capsys.readouterr().out == ""


def test_a_row_that_needs_more_is_refused_by_name():
    class Rows(NumberedRows):
        def __getitem__(self, index):
            trainable = np.arange(32) < index * BLOCK
            return {**super().__getitem__(index), "trainable": trainable}

    config = TrainConfig(rows=4, row_length=32, block_size=BLOCK, prediction_blocks=3)
    steps = step_rows([(Rows(4, length=32), 1.0)], config)
    read = steps.read(0, range(4))
    by_number = dict(zip(read["tokens"][0, :, 0], read["prediction_blocks"][0], strict=True))
    assert by_number[0].tolist() == [8, 8, 8]
    assert by_number[3].tolist() == [0, 1, 2]
    steps = step_rows([(Rows(5, length=32), 1.0)], dataclasses.replace(config, rows=5))
    with pytest.raises(
        InputError, match="from 0: row 4: 4 blocks have tokens to train on, more than 3"
    ):
        steps.read(0, range(5))


@pytest.mark.parametrize(
    ("given", "needed", "sequence", "chosen"),
    [
        (0, 3, 1, 3),
        (0, 8, 1, 8),
        (0, 0, 1, 1),
        (0, None, 1, 8),
        (0, 9, 1, 8),  # of folders in other blocks, which are refused for that
        (5, 3, 1, 5),
        (5, None, 1, 5),
        (0, 3, 16, 4),  # 32 + 3 * 4 tokens are no multiple of 16
        (0, 5, 64, 8),
        (9, 3, 1, "must be at most 8, the blocks of a row of 32 tokens, not 9"),
        (2, 3, 1, "prediction_blocks 2: a row of the data has 3 blocks .*; 0 makes room"),
    ],
)
def test_the_room_is_what_is_needed_and_what_the_mesh_divides(given, needed, sequence, chosen):
    config = TrainConfig(row_length=32, block_size=4, prediction_blocks=given)
    if isinstance(chosen, str):
        with pytest.raises(InputError, match=chosen):
            with_prediction_blocks(config, lambda _: needed, sequence)
        return
    assert with_prediction_blocks(config, lambda _: needed, sequence).prediction_blocks == chosen
    ar = dataclasses.replace(config, objective="ar")
    assert with_prediction_blocks(ar, lambda _: needed, sequence) is ar


def test_each_phase_has_its_own_room():
    phases = [
        PhaseSection(from_step=5, sources={"b": 1.0}, row_length=64),
        PhaseSection(from_step=9, sources={"a": 1.0}, row_length=32),
    ]
    data = DataSection(sources={"a": 1.0}, tokenizer="somewhere")
    config = TrainConfig(steps=20, row_length=32, block_size=4, data=data, phases=phases)
    found = with_prediction_blocks(
        config, lambda own: {"a": 3, "b": 7}[next(iter(own.data.sources))], 1
    )
    assert [phase.config.prediction_blocks for phase in phases_of(found)] == [3, 7, 3]
    assert [phase.batch_shape[2:] for phase in phases_of(found)] == [(32, 12), (64, 28), (32, 12)]
    config.phases = [dataclasses.replace(phases[0], prediction_blocks=17)]
    with pytest.raises(InputError, match=r"phases\[0\].prediction_blocks must be at most 16"):
        with_prediction_blocks(config, lambda _: 3, 1)


def test_rows_in_memory_have_the_room_that_they_need():
    trainable = np.zeros((2, 32), bool)
    trainable[0, 9], trainable[1, 20:29] = True, True
    config = TrainConfig(row_length=32, block_size=4)
    rows = blocks_of_rows({"trainable": trainable}, config, 1)
    assert rows["prediction_blocks"].tolist() == [[2, 8, 8], [5, 6, 7]]
    ar = dataclasses.replace(config, objective="ar")
    assert "prediction_blocks" not in blocks_of_rows({"trainable": trainable}, ar, 1)
    assert "prediction_blocks" not in blocks_of_rows({"trainable": ~trainable}, config, 1)
