"""`loss.remat: auto`: the policy that computes least anew, and the largest micro-batches that
fit."""

import dataclasses
import json
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.examples.training import TINY
from train import automatic
from train.automatic import REMEMBERED, first_that_fits, possible_parts, settled, settled_here
from train.program import make_program
from train.recipe.config import MetricsSection, OptimizerSection, PhaseSection, TrainConfig
from train.recipe.phases import largest_phase, phases_of
from wedlm_jax.errors import InputError
from wedlm_jax.model.layers import POLICIES
from wedlm_jax.sharding import make_mesh


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


def test_what_fits_nowhere_is_refused():
    with pytest.raises(InputError, match=r"10% of a device's 2.0 GiB: .* takes 1.9 GiB"):
        first_that_fits([lambda: 2**31 - 2**27] * 3, 2**31, 1)
    with pytest.raises(InputError, match="takes more than there is"):
        first_that_fits([lambda: None] * 3, 2**31, 1)


@pytest.fixture
def cache(tmp_path):
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_was_found_is_remembered_for_the_same_program_only(cache):
    config, said, compiler = TrainConfig(rows=16), [], Compiler()

    def settle(config, capacity=800, model=TINY):
        return settled(config, model, tpus(16), capacity, compiler.peak, said.append).loss.remat

    assert settle(config) == "projections"  # 700 of 800, and 720 may be taken
    asked = len(compiler.asked)
    assert settle(config) == "projections"
    assert settle(dataclasses.replace(config, steps=7, output="elsewhere")) == "projections"
    # A run that goes on finds its model described as a WeDLM.
    model = dataclasses.replace(TINY, model_type="llama")
    assert settle(config, model=model) == "projections"
    assert len(compiler.asked) == asked
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
    (cache / REMEMBERED).write_bytes(b"\xff{")
    assert settle(config) == "projections"


def test_a_named_policy_compiles_nothing():
    named = TrainConfig()
    named.loss.remat = "full"
    assert settled(named, TINY, tpus(), 800, lambda _: pytest.fail("compiled")) is named


@pytest.mark.parametrize(("capacity", "programs"), [(10_000, ["none"]), (500, None)])
def test_a_cpu_begins_with_the_program_that_will_run(cache, capacity, programs):
    asked = []

    def peak_of(config):
        asked.append(config.loss.remat)
        return 1000 - 100 * POLICIES.index(config.loss.remat)

    config, mesh = TrainConfig(rows=64, row_length=4096), make_mesh({"fsdp": 2}, jax.devices()[:2])
    found = settled(config, TINY, mesh, capacity, peak_of, lambda _: None)
    assert (found.rows, found.accumulation) == (64, 1)
    assert asked[0] == "none"
    if programs:
        assert asked == programs
    assert found.loss.remat == ("none" if programs else "offload")


def test_a_device_of_unknown_memory_needs_a_name():
    with pytest.raises(InputError, match="TPU v5 does not say how much memory it has"):
        settled(TrainConfig(), TINY, tpus(), None, Compiler().peak)


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
    cache, capacity, policy, parts
):
    compiler, said = Compiler(), []
    recipe = TrainConfig(
        rows=16, accumulation=3, row_length=4096, phases=[PhaseSection(from_step=9, accumulation=1)]
    )
    found = settled(recipe, TINY, tpus(), capacity, compiler.peak, said.append)
    assert (found.loss.remat, found.rows, found.accumulation) == (policy, 16 // parts, 3 * parts)
    # All phases have the same tokens a step as before.
    assert [p.config.rows * p.config.accumulation for p in phases_of(found)] == [48, 16]
    assert [p.config.accumulation for p in phases_of(found)] == [3 * parts, parts]
    assert len(compiler.asked) <= 5
    if parts > 1:
        assert f"{16 // parts} rows in each of {3 * parts} micro-batches" in said[-1]
    again = settled(recipe, TINY, tpus(), capacity, lambda _: pytest.fail("compiled"), said.append)
    assert again == found


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
    assert list(json.loads((cache / REMEMBERED).read_text()).values()) == [["none", 2]]
