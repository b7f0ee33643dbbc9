"""`loss.remat: auto` finds the policy that computes least anew and fits, and remembers it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from tests.examples.training import TINY
from train.program import make_program
from train.recipe.config import MetricsSection, OptimizerSection, PhaseSection, TrainConfig
from train.remat import REMEMBERED, cheapest_policy, settled, settled_here
from wedlm_jax.errors import InputError
from wedlm_jax.model.rematerialisation import POLICIES
from wedlm_jax.sharding import make_mesh

TPU = [SimpleNamespace(device_kind="TPU v5", platform="tpu")] * 4


class Compiler:
    """Peaks that fall from policy to policy: 1,000, 900, ... bytes; what does not fit into 950 is
    refused, as compilers do."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def peak(self, policy: str) -> int | None:
        self.asked.append(policy)
        peak = 1000 - 100 * POLICIES.index(policy)
        return None if peak > 950 else peak


@pytest.mark.parametrize("index", range(len(POLICIES)))
def test_the_first_policy_that_leaves_a_tenth_is_found_in_three_programs(index: int) -> None:
    peak = 1000 - 100 * index
    compiler = Compiler()
    if peak > 950:
        assert cheapest_policy(lambda _: 1000, 10_000) == POLICIES[0]
        return
    assert cheapest_policy(compiler.peak, -(-peak * 10 // 9)) == POLICIES[index]
    assert len(compiler.asked) <= 3


def test_what_fits_nowhere_is_refused() -> None:
    with pytest.raises(InputError, match=r"10% of a device's 2.0 GiB: .* takes 1.9 GiB"):
        cheapest_policy(lambda _: 2**31 - 2**27, 2**31)
    with pytest.raises(InputError, match="takes more than there is"):
        cheapest_policy(lambda _: None, 2**31)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_what_was_found_is_remembered_for_the_same_program_only(cache: Path) -> None:
    config, said, compiler = TrainConfig(), list[str](), Compiler()

    def settle(config: TrainConfig, capacity: int = 800) -> str:
        return settled(config, TINY, TPU, capacity, compiler.peak, said.append).loss.remat

    assert settle(config) == "projections"  # 700 of 800, and 720 may be taken
    asked = len(compiler.asked)
    assert settle(config) == "projections"
    assert settle(dataclasses.replace(config, steps=7, output="elsewhere")) == "projections"
    assert len(compiler.asked) == asked
    assert [line.rpartition(" ")[2] for line in said[:3]] == ["fits", "compiling", "remembered"]
    settle(config, 600)
    for others in (
        {"rows": 16},
        {"phases": [PhaseSection(from_step=3, rows=64)]},
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


def test_a_named_policy_compiles_nothing() -> None:
    named = TrainConfig()
    named.loss.remat = "full"
    assert settled(named, TINY, TPU, 800, lambda _: pytest.fail("compiled")) is named


@pytest.mark.parametrize(("capacity", "programs"), [(10_000, ["none"]), (500, None)])
def test_a_cpu_begins_with_the_program_that_will_run(
    cache: Path, capacity: int, programs: list[str] | None
) -> None:
    asked: list[str] = []

    def peak_of(policy: str) -> int:
        asked.append(policy)
        return 1000 - 100 * POLICIES.index(policy)

    found = settled(TrainConfig(), TINY, jax.devices(), capacity, peak_of, lambda _: None)
    assert asked[0] == "none"
    if programs:
        assert asked == programs
    assert found.loss.remat == ("none" if programs else "offload")


def test_a_device_of_unknown_memory_needs_a_name() -> None:
    with pytest.raises(InputError, match="TPU v5 does not say how much memory it has"):
        settled(TrainConfig(), TINY, TPU, None, Compiler().peak)


def test_a_small_step_fits_this_machine(cache: Path) -> None:
    config = TrainConfig(rows=1, row_length=32, block_size=4)
    mesh = make_mesh({"fsdp": 1}, jax.devices()[:1])
    with jax.set_mesh(mesh):
        program = settled_here(make_program(config, TINY, mesh))
    assert program.config.loss.remat == program.objective.loss.remat == "none"
    assert list(json.loads((cache / REMEMBERED).read_text()).values()) == ["none"]
