"""The order of rows, a function of seed and step, and global batches on a mesh."""

import dataclasses
import threading
from collections import namedtuple
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from tests.examples.data import NumberedRows, one_phase, step_rows
from train.data.batches import TrainBatches, host_rows, place_rows
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
STEPS = step_rows(DATA, CONFIG)


def expected(step):
    return STEPS.read(step, range(8))


def batches_of(sets, sharding=None, start=0):
    """By default on one device."""
    sharding = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return TrainBatches(one_phase(sets, CONFIG), [sets], sharding, start)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh({"data": 2, "fsdp": 2, "tensor": 2}, jax.devices()[:8])


def test_batches_on_a_mesh_are_the_steps_of_the_order(mesh):
    sharding = batch_sharding(mesh)
    with batches_of(DATA, sharding, start=9) as batches:
        read = list(batches)
        with pytest.raises(StopIteration):
            next(batches)
    assert len(read) == 3
    for step, rows in enumerate(read, 9):
        for name, array in expected(step).items():
            assert getattr(rows, name).sharding == sharding
            np.testing.assert_array_equal(getattr(rows, name), array, strict=True)


@pytest.mark.parametrize("hosts", [2, 4])
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
        # The others' rows are filled with nonsense.
        whole = {name: np.full((2, 8, x.shape[-1]), -1, x.dtype) for name, x in local.items()}
        for name, x in local.items():
            whole[name][:, rows] = x
        here = place_rows(whole, range(8), SHAPE, sharding).tokens
        arrays |= {s.device: s.data for s in here.addressable_shards if s.device in own}
    placed = jax.make_array_from_single_device_arrays(SHAPE, sharding, list(arrays.values()))
    np.testing.assert_array_equal(placed, expected(5)["tokens"])


HostOf = namedtuple("HostOf", ["device", "process_index"])


def over_two_hosts(sharding, devices):
    """What a batch asks of a sharding whose devices are two hosts', each the half of them."""
    hosts = [HostOf(device, 2 * i // len(devices)) for i, device in enumerate(devices)]

    def indices(shape):
        real = sharding.devices_indices_map(shape)
        return {host: real[host.device] for host in hosts}

    return SimpleNamespace(device_set=set(hosts), devices_indices_map=indices)


def test_the_rows_of_each_host_are_told_by_file_and_number(mesh, monkeypatch):
    sharding = batch_sharding(mesh)
    wanted = expected(5)["tokens"][..., 0]

    def told(files):
        return sorted(int(f.split()[1]) + n for f, numbers in files.items() for n in numbers)

    with batches_of(DATA, sharding, start=9) as batches:
        monkeypatch.setattr(batches, "_sharding", over_two_hosts(sharding, list(mesh.devices.flat)))
        first, second = batches.read_from(5)
    assert told(first) == sorted(wanted[:, :4].reshape(-1).tolist())
    assert told(second) == sorted(wanted[:, 4:].reshape(-1).tolist())


class BrokenRows(NumberedRows):
    def __getitem__(self, index):
        raise InputError("rows-00000: row 7 cannot be read")


def test_what_cannot_be_read_is_raised_where_the_batch_is_asked_for():
    with batches_of([(BrokenRows(40), 1.0)]) as batches:
        for _ in range(2):
            with pytest.raises(InputError, match="row 7 cannot be read"):
                next(batches)


def test_closing_ends_the_reading():
    threads = threading.active_count()
    batches = batches_of(DATA)
    next(batches)
    batches.close()
    batches.close()
    assert threading.active_count() <= threads + CONFIG.data.prefetch + 1  # grain's own, idle


def test_a_seed_gives_the_order_that_it_always_gave():
    """With another order, a resumed run would read other rows than it would have without a stop."""
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))

    def numbers(step, seed=4, rows=3):
        sizes = {"steps": 25, "seed": seed, "accumulation": 6 // rows, "rows": rows}
        steps = step_rows(sets, dataclasses.replace(CONFIG, **sizes))
        return steps.read(step, range(rows))["tokens"][..., 0].tolist()

    assert [numbers(step) for step in (0, 9)] == [
        [[0, 2, 7], [103, 6, 11]],
        [[12, 9, 103], [13, 8, 102]],
    ]
    # In one micro-batch it is the same global batch, and with another seed it is not.
    assert numbers(0, rows=6) == [[0, 2, 7, 103, 6, 11]]
    assert numbers(0, seed=5) != numbers(0)
    # The first two epochs of each source: each has all of its rows, in an order of its own.
    whole = [number for step in range(10) for row in numbers(step) for number in row]
    for first, size in ((0, 20), (100, 9)):
        read = [number for number in whole if first <= number < first + 100]
        epochs = [read[:size], read[size : 2 * size]]
        assert [sorted(epoch) for epoch in epochs] == [list(range(first, first + size))] * 2
        assert epochs[0] != epochs[1]
