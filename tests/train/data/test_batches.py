"""The order of rows, a function of seed and step, and global batches on a mesh."""

import dataclasses
import threading
from collections import Counter, namedtuple
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
        [alone] = batches.read_from(5)
        assert list(alone) == ["from 0", "from 100"]
        assert told(alone) == sorted(wanted.reshape(-1).tolist())
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


A, R = 2, 3


def steps_of(*sets, seed=4, shape=(A, R)):
    config = dataclasses.replace(CONFIG, steps=25, seed=seed, accumulation=shape[0], rows=shape[1])
    return step_rows(sets, config)


def numbers(steps, step, rows=range(R)):
    return steps.read(step, rows)["tokens"][..., 0]


def test_weights_are_shares_of_every_stretch_and_each_source_has_epochs_of_its_own():
    sets = (
        (NumberedRows(500), 6.0),
        (NumberedRows(50, first=1000), 3.0),
        (NumberedRows(900, first=2000), 1.0),
    )
    read = numbers(steps_of(*sets, shape=(1, 400)), 0, range(400))[0].tolist()
    for stretch in (read[:100], read[250:350], read):
        sources = Counter(n // 1000 for n in stretch)
        for source, share in enumerate((0.6, 0.3, 0.1)):
            assert sources[source] / len(stretch) == pytest.approx(share, abs=0.02)
    small = [n for n in read if n // 1000 == 1]
    first, second = small[:50], small[50:100]
    assert sorted(first) == sorted(second) == list(range(1000, 1050))
    assert first != second, "each epoch has an order of its own"
    assert first != sorted(first)
    assert max(Counter(n for n in read if n // 1000 != 1).values()) == 1


def test_a_seed_gives_the_order_that_it_always_gave():
    """With another order, a resumed run would read other rows than it would have without a stop."""
    sets = ((NumberedRows(20), 0.7), (NumberedRows(9, first=100), 0.3))
    steps = steps_of(*sets)
    assert [numbers(steps, step).tolist() for step in (0, 9)] == [
        [[0, 2, 7], [103, 6, 11]],
        [[12, 9, 103], [13, 8, 102]],
    ]
    # In one micro-batch it is the same global batch, and with another seed it is not.
    at_once = numbers(steps_of(*sets, shape=(1, 6)), 0, range(6))
    assert at_once.tolist() == [[0, 2, 7, 103, 6, 11]]
    assert numbers(steps_of(*sets, seed=5), 0).tolist() != [[0, 2, 7], [103, 6, 11]]
