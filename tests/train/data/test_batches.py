"""Global batches on a mesh, whichever rows a host holds."""

from __future__ import annotations

import dataclasses
import threading
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from tests.examples.data import NumberedRows
from train.data.batches import TrainBatches, host_rows, place_rows
from train.data.order import StepRows
from train.recipe.config import DataSection, TrainConfig
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import batch_sharding, make_mesh

CONFIG = TrainConfig(
    steps=12,
    rows=8,
    accumulation=2,
    row_length=4,
    block_size=2,
    seed=3,
    data=DataSection(prefetch=2),
)
DATA = [(NumberedRows(40), 0.75), (NumberedRows(30, first=100), 0.25)]
SHAPE = (2, 8, 4)
STEPS = StepRows(DATA, seed=3, shape=(2, 8))


def expected(step):
    return STEPS.read(step, range(8))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])


def test_batches_on_a_mesh_are_the_steps_of_the_order(mesh):
    sharding = batch_sharding(mesh)
    with TrainBatches(DATA, CONFIG, sharding, start=9) as batches:
        read = list(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert len(read) == 3
    for step, rows in enumerate(read, 9):
        for name, array in expected(step).items():
            placed = getattr(rows, name)
            assert placed.sharding == sharding
            assert placed.dtype == array.dtype
            np.testing.assert_array_equal(placed, array)


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_every_host_reads_its_devices_rows_only_and_all_make_one_batch(mesh, hosts):
    sharding = batch_sharding(mesh)
    devices = list(mesh.devices.flat)
    share = len(devices) // hosts
    arrays = {}
    for host in range(hosts):
        own = devices[host * share : (host + 1) * share]
        rows = host_rows(sharding, SHAPE, own)
        assert len(rows) == 8 // hosts
        local = STEPS.read(5, rows)
        arrays |= shards_of(local, rows, sharding, own)
    placed = jax.make_array_from_single_device_arrays(SHAPE, sharding, list(arrays.values()))
    np.testing.assert_array_equal(placed, expected(5)["tokens"])


@dataclasses.dataclass(frozen=True)
class HostOf:
    """A device as another host's: what a batch asks of it."""

    device: jax.Device
    process_index: int


class OverHosts:
    """A sharding whose devices are two hosts', each the half of them."""

    def __init__(self, sharding, devices):
        half = len(devices) // 2
        self._real = sharding
        self._hosts = {device: HostOf(device, i // half) for i, device in enumerate(devices)}
        self.device_set = set(self._hosts.values())

    def devices_indices_map(self, shape):
        real = self._real.devices_indices_map(shape)
        return {host: real[device] for device, host in self._hosts.items()}

    def __getattr__(self, name):
        return getattr(self._real, name)


def test_the_rows_of_each_host_are_told_by_file_and_number(mesh, monkeypatch):
    sharding = batch_sharding(mesh)
    wanted = expected(5)["tokens"][..., 0]

    def told(files):
        return sorted(int(f.split()[1]) + n for f, numbers in files.items() for n in numbers)

    with TrainBatches(DATA, CONFIG, sharding, start=9) as batches:
        [alone] = batches.read_from(5)
        assert list(alone) == ["from 0", "from 100"]
        assert told(alone) == sorted(wanted.reshape(-1).tolist())
        monkeypatch.setattr(batches, "_sharding", OverHosts(sharding, list(mesh.devices.flat)))
        first, second = batches.read_from(5)
    assert told(first) == sorted(wanted[:, :4].reshape(-1).tolist())
    assert told(second) == sorted(wanted[:, 4:].reshape(-1).tolist())


def shards_of(local, rows, sharding, own):
    """What a host of these devices puts on each. The others' rows are not there to be read:
    here, on the one host there is, all of them are filled with nonsense."""
    full = {name: np.full(SHAPE, -1, array.dtype) for name, array in local.items()}
    for name, array in local.items():
        full[name][:, rows] = array
    placed = place_rows(full, range(8), SHAPE, sharding).tokens
    return {s.device: s.data for s in placed.addressable_shards if s.device in own}


def test_rows_that_are_not_the_first_are_found(mesh):
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert host_rows(place, SHAPE) == list(range(8))
    half = Mesh(np.array(jax.devices()[:2]), ("data",))
    sharding = jax.sharding.NamedSharding(half, jax.sharding.PartitionSpec(None, "data"))
    assert host_rows(sharding, SHAPE, jax.devices()[1:2]) == [4, 5, 6, 7]


@pytest.mark.full
def test_worker_processes_read_the_same_batches():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    config = TrainConfig(
        steps=6,
        rows=8,
        accumulation=2,
        row_length=4,
        block_size=2,
        seed=3,
        data=DataSection(workers=2, prefetch=2),
    )
    with TrainBatches(DATA, config, place, start=2) as batches:
        for step in range(2, 6):
            np.testing.assert_array_equal(next(batches).tokens, expected(step)["tokens"])


class BrokenRows(NumberedRows):
    def __getitem__(self, index):
        raise InputError("rows-00000: row 7 cannot be read")


def test_what_cannot_be_read_is_raised_where_the_batch_is_asked_for():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with TrainBatches([(BrokenRows(40), 1.0)], CONFIG, place) as batches:
        for _ in range(2):
            with pytest.raises(InputError, match="row 7 cannot be read"):
                next(batches)


class SlowRows(NumberedRows):
    def __getitem__(self, index):
        time.sleep(0.005)
        return super().__getitem__(index)


def test_waiting_for_input_is_counted_and_closing_ends_the_reading():
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    threads = threading.active_count()
    batches = TrainBatches([(SlowRows(40), 1.0)], CONFIG, place)
    assert batches.input_wait == 0
    next(batches)
    assert batches.input_wait > 0.03  # sixteen rows of 5 ms, from when the reading began
    batches.close()
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
    assert not batches._thread.is_alive()
    assert threading.active_count() <= threads + CONFIG.data.prefetch + 1  # grain's own, idle
