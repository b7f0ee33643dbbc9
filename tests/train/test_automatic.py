"""What a recipe leaves to the run: the room for prediction blocks, the policy of recomputation that
computes least anew, and the largest micro-batches that fit."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.examples.data import CHAT, EMBEDDED, NumberedRows, step_rows, tokenised, write_jsonl
from tests.examples.tiny_run import metric_lines, tiny_recipe
from tests.examples.train_step import OBJECTIVE, assert_same, gradients_of
from tests.examples.training import BLOCK, TINY, packed, random_sample
from train import automatic
from train.automatic import (
    blocks_of_rows,
    first_that_fits,
    possible_parts,
    settled,
    settled_here,
    with_prediction_blocks,
)
from train.data.shards import read_manifest
from train.loop import train as run_training
from train.program import make_program
from train.recipe.config import (
    DataSection,
    MetricsSection,
    OptimizerSection,
    PhaseSection,
    TrainConfig,
)
from train.recipe.phases import largest_phase, phases_of
from wedlm_jax.errors import InputError
from wedlm_jax.model.layers import POLICIES
from wedlm_jax.packing import prediction_blocks, trainable_blocks
from wedlm_jax.sharding import make_mesh

LENGTH, ROOM = 32, 6


def placed(rows):
    """The same rows ``[R, L]`` with the places of their prediction blocks."""
    places = [prediction_blocks(row, BLOCK, ROOM) for row in np.asarray(rows.trainable)]
    return dataclasses.replace(rows, prediction_blocks=jnp.asarray(np.stack(places)))


def conversation(random, *turns):
    """A sample whose turns, of these lengths, are the user's and the assistant's by turns."""
    sample = random_sample(random, sum(turns))
    trainable = np.repeat(np.arange(len(turns)) % 2 == 1, turns)
    return dataclasses.replace(sample, trainable=trainable, masked=sample.masked & trainable)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_loss_and_gradients_are_those_with_all_blocks(seed):
    """In two micro-batches. That backends of attention agree, their own tests say."""
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

    # One row needs all the room, and one holds nothing but a prompt.
    given_rows = [conversation(random, 5, 22, 5)], [conversation(random, 20)], row(), row()
    rows, masked, ratio = packed(given_rows, LENGTH)
    assume(trainable_blocks(np.asarray(rows.trainable), BLOCK).sum(-1).max() == ROOM)
    whole = gradients_of(rows, masked, ratio, steps=1, objective=OBJECTIVE)
    in_two = gradients_of(placed(rows), masked, ratio, steps=2, objective=OBJECTIVE)
    assert float(whole[1]["mlm_loss"]) > 1
    assert_same(in_two, whole)


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
    config = chat_recipe(tmp_path / "auto", chats)
    run_training(config)
    assert (
        f"prediction_blocks: the prediction stream has room for {most} of a row's 8 blocks\n"
        in capsys.readouterr().out
    )
    run_training(config)
    told = capsys.readouterr().out
    assert "resumed from step 4" in told
    assert "not as before" not in told
    run_training(chat_recipe(tmp_path / "all", chats, prediction_blocks=8))
    assert "the prediction stream" not in capsys.readouterr().out
    few, whole = metric_lines(tmp_path / "auto"), metric_lines(tmp_path / "all")
    assert len(few) == 4
    for own, other in zip(few, whole, strict=True):
        assert own.keys() == other.keys()
        for name in ("loss", "mlm_loss", "ar_loss", "masked_accuracy"):
            assert own[name] == pytest.approx(other[name], rel=2e-4), name


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
        (2, 3, 1, "prediction_blocks is 2, but a row of the data has 3 blocks .*; 0 makes room"),
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


def tpus(count=4, **axes):
    """A mesh of TPUs that are not here, all on ``fsdp`` but for what ``axes`` say."""
    device = SimpleNamespace(device_kind="TPU v5", platform="tpu")
    shape = {"data": 1, "fsdp": count, "tensor": 1, "sequence": 1} | axes
    return SimpleNamespace(devices=np.array([device] * count), shape=shape)


class Compiler:
    """Peaks of 1,000, 900, ... bytes for 16 rows, policy by policy; refuses what is above 950."""

    def __init__(self):
        self.asked = []

    def peak(self, config):
        self.asked.append((config.loss.remat, config.accumulation))
        held = 900 - 100 * POLICIES.index(config.loss.remat)
        peak = 100 + held * largest_phase(config).config.rows // 16
        return None if peak > 950 else peak


@pytest.mark.parametrize("index", range(6))
def test_the_first_peak_that_leaves_a_tenth_is_found_in_three(index):
    asked = []

    def peak(number):
        asked.append(number)
        return 1000 - 100 * number

    peaks = [partial(peak, number) for number in range(6)]
    capacity = -(-(1000 - 100 * index) * 10 // 9)
    assert first_that_fits(peaks, capacity, 3) == index
    assert len(asked) <= 3
    assert len(set(asked)) == len(asked)


def test_what_fits_nowhere_is_refused_and_what_is_named_is_not_tried():
    with pytest.raises(InputError, match=r"10% of a device's 2.0 GiB free: .* takes 1.9 GiB"):
        first_that_fits([lambda: 2**31 - 2**27] * 3, 2**31, 1)
    with pytest.raises(InputError, match="takes more than there is"):
        first_that_fits([lambda: None] * 3, 2**31, 1)
    config = TrainConfig()
    with pytest.raises(InputError, match="TPU v5 does not report how much memory it has"):
        settled(config, TINY, tpus(), None, Compiler().peak)
    config.loss.remat = "full"
    assert settled(config, TINY, tpus(), None, lambda _: pytest.fail("compiled")) is config


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_was_found_is_remembered_for_the_same_program_only(cache, capsys):
    config, compiler = TrainConfig(rows=16), Compiler()

    def settle(config, capacity=800, model=TINY):
        return settled(config, model, tpus(16), capacity, compiler.peak).loss.remat

    assert settle(config) == "projections"  # 700 of 800, and 720 may be taken
    asked = len(compiler.asked)
    assert settle(config) == "projections"
    assert settle(dataclasses.replace(config, steps=7, output="elsewhere")) == "projections"
    # A run that goes on finds its model described as a WeDLM.
    model = dataclasses.replace(TINY, model_type="llama")
    assert settle(config, model=model) == "projections"
    assert len(compiler.asked) == asked
    said = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[2] for line in said[:3]] == ["fits", "compiling", "remembered"]
    settle(config, 600)
    for others in (
        {"rows": 8},
        {"phases": [PhaseSection(from_step=3, rows=32)]},
        {"optimizer": OptimizerSection(average=0.9)},
        {"optimizer": OptimizerSection(first_moment_dtype="bfloat16")},
        {"metrics": MetricsSection(norms=False)},
    ):
        asked = len(compiler.asked)
        settle(dataclasses.replace(config, **others))
        assert len(compiler.asked) > asked
    # A phase with smaller batches takes no more memory than the recipe.
    smaller = [PhaseSection(from_step=3, rows=config.rows // 2)]
    asked = len(compiler.asked)
    settle(dataclasses.replace(config, phases=smaller))
    assert len(compiler.asked) == asked
    for path in cache.glob("remat-*.json"):
        path.write_bytes(b"\xff{")
    assert settle(config) == "projections"


@pytest.mark.parametrize(("capacity", "programs"), [(10_000, ["none"]), (500, None)])
def test_a_cpu_begins_with_the_program_that_will_run(cache, capacity, programs):
    asked = []

    def peak_of(config):
        asked.append(config.loss.remat)
        return 1000 - 100 * POLICIES.index(config.loss.remat)

    config, mesh = TrainConfig(rows=64, row_length=4096), make_mesh({"fsdp": 2}, jax.devices()[:2])
    found = settled(config, TINY, mesh, capacity, peak_of)
    assert (found.rows, found.accumulation) == (64, 1)
    assert asked[0] == "none"
    if programs:
        assert asked == programs
    assert found.loss.remat == ("none" if programs else "offload")


@pytest.mark.parametrize(
    ("capacity", "policy", "parts"),
    [
        (1000, "products", 1),  # 900 of 900 that may be taken
        (900, "products", 2),  # 500 of 810
        (500, "products", 4),  # 300 of 450
        (300, "projections", 4),  # 270 may be taken: gate takes 275
        (223, "full", 4),
    ],
)
def test_micro_batches_are_cut_no_finer_than_the_cheapest_policy_needs(
    cache, capsys, capacity, policy, parts
):
    compiler = Compiler()
    recipe = TrainConfig(
        rows=16, accumulation=3, row_length=4096, phases=[PhaseSection(from_step=9, accumulation=1)]
    )
    found = settled(recipe, TINY, tpus(), capacity, compiler.peak)
    assert (found.loss.remat, found.rows, found.accumulation) == (policy, 16 // parts, 3 * parts)
    # All phases have the same tokens per step as before.
    assert [p.config.rows * p.config.accumulation for p in phases_of(found)] == [48, 16]
    assert [p.config.accumulation for p in phases_of(found)] == [3 * parts, parts]
    assert len(compiler.asked) <= 5
    if parts > 1:
        said = f"{16 // parts} rows in each of {3 * parts} micro-batches"
        assert said in capsys.readouterr().out
    assert settled(recipe, TINY, tpus(), capacity, lambda _: pytest.fail("compiled")) == found


def test_a_micro_batch_is_cut_into_whole_rows_of_every_device_and_phase():
    def parts(rows, mesh, length=4096, **fields):
        config = TrainConfig(rows=rows, row_length=length, steps=9, **fields)
        return possible_parts(config, mesh)

    assert parts(512, tpus(128)) == [1, 2, 4]
    assert parts(512, tpus(512)) == [1]
    assert parts(24, tpus(2)) == [1, 2, 3, 4, 6, 12]
    assert parts(24, tpus(2), phases=[PhaseSection(from_step=3, rows=8)]) == [1, 2, 4]
    # Two rows of 1,024 tokens in each stream, or as many halves of 2,048, are the least.
    assert parts(64, tpus(4), 1024) == [1, 2, 4, 8]
    assert parts(8, tpus(4, fsdp=2, sequence=2), 2048) == [1, 2]
    # The mesh does not divide them: that is refused elsewhere.
    assert parts(3, tpus(2)) == [1]


@pytest.mark.full
def test_the_program_that_runs_is_cut_as_was_found(cache, monkeypatch):
    """Of two compilations, that of whole micro-batches is too large."""
    peaks = iter([0, 2**60])
    monkeypatch.setattr(automatic, "peak_bytes", lambda _: next(peaks))
    monkeypatch.setattr(automatic, "possible_parts", lambda *_: [1, 2])
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        given = make_program(TrainConfig(rows=2, row_length=32, block_size=4), TINY, mesh)
        program = settled_here(given)
    assert (program.config.rows, program.config.accumulation) == (1, 2)
    assert program.rows.tokens.shape == (2, 1, 32)
    assert next(peaks, None) is None
    (path,) = cache.glob("remat-*.json")
    assert json.loads(path.read_text()) == ["none", 2]
