"""Hugging Face folders onto a mesh and from one: the same bits, and no byte more than needed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

from tests.examples.checkpoints import (
    assert_same_bits,
    hf_values,
    set_tensors,
    tiny_config,
    write_tiny,
)
from wedlm_jax.checkpoint import hf_export, hf_import, safetensors_file
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.hf_export import Tensor, plan_files, write_weights
from wedlm_jax.checkpoint.hf_folder import HFCheckpoint
from wedlm_jax.checkpoint.hf_import import (
    parameter_sharding,
    read_parameter,
    read_slices,
    rows_first,
)
from wedlm_jax.checkpoint.names import parameter_entries
from wedlm_jax.checkpoint.safetensors_file import SafetensorsFile
from wedlm_jax.config import PARTS
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import Processes
from wedlm_jax.model import Transformer
from wedlm_jax.sharding import make_mesh, tree_shardings

MESHES = {
    "fsdp": {"fsdp": 8},
    "tensor": {"data": 2, "tensor": 4},
    "mixed": {"data": 2, "fsdp": 2, "tensor": 2},
    "fsdp over tensor": {"fsdp": 4, "tensor": 2},
    "sequence": {"fsdp": 4, "sequence": 2},
}
STYLE = dict.fromkeys(PARTS, True)


def arrays(model: Transformer) -> dict[str, np.ndarray]:
    return {path: np.asarray(value) for path, value in arrays_from_model(model).items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files; not to be changed."""
    path = tmp_path_factory.mktemp("hf") / "a"
    return write_tiny(path, dtype="bfloat16", shard_bytes=2000, **STYLE)


# --- import ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("dtype", [None, "float32"])
def test_onto_a_mesh_as_onto_one_device(folder: Path, sizes: dict, dtype: str | None) -> None:
    mesh = make_mesh(sizes)
    model = load_checkpoint(folder, mesh=mesh, dtype=dtype)
    assert_same_bits(arrays(model), arrays(load_checkpoint(folder, dtype=dtype)))
    state = nnx.state(model)
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(tree_shardings(mesh, state)), strict=True
    ):
        assert leaf.sharding == sharding


def test_mesh_that_does_not_divide_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"tensor 8.* does not divide parameter .* of shape \["):
        load_checkpoint(folder, mesh=make_mesh({"tensor": 8}))


def test_faults_are_told_before_values_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny(tmp_path / "a")
    set_tensors(folder, **{"model.norm.weight": np.zeros(3, np.float32)})
    monkeypatch.setattr(SafetensorsFile, "_fill", None)
    with pytest.raises(InputError, match=r"'model\.norm\.weight' has shape \[3\], expected \[16\]"):
        load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))


def test_overflow_names_the_tensor_on_a_mesh_too(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "a")
    set_tensors(folder, **{"model.norm.weight": np.float32([1e5] * 16)})
    with pytest.raises(InputError, match=r"'model\.norm\.weight' .* too large for float16"):
        load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}), dtype="float16")


def test_file_cut_while_it_is_read(tmp_path: Path) -> None:
    checkpoint = HFCheckpoint(write_tiny(tmp_path / "a"))
    path = tmp_path / "a" / "model.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size // 2)
    last = list(checkpoint.tensors)[-1]
    with pytest.raises(InputError, match=r"model\.safetensors: truncated while"):
        checkpoint.read(last)


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The size of each read of values."""
    sizes: list[int] = []
    fill = SafetensorsFile._fill

    def counting(self: SafetensorsFile, values: np.ndarray, offset: int) -> None:
        sizes.append(values.nbytes)
        fill(self, values, offset)

    monkeypatch.setattr(SafetensorsFile, "_fill", counting)
    return sizes  # type: ignore[return-value]


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_each_byte_is_read_once(folder: Path, sizes: dict, bytes_read: list[int]) -> None:
    load_checkpoint(folder, mesh=make_mesh(sizes))
    assert sum(bytes_read) == sum(x.nbytes for x in hf_values(folder).values())


def test_cut_columns_are_read_in_as_few_reads_as_whole_ones(
    folder: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for every tensor that fits a buffer, however many devices share its columns."""
    load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))
    assert len(bytes_read) == len(hf_values(folder))
    bytes_read.clear()
    monkeypatch.setattr(safetensors_file, "BUFFER_BYTES", 256)
    load_checkpoint(folder, mesh=make_mesh({"fsdp": 8}))
    # A buffer holds at least half of its size in whole rows, but for what is left at the end.
    assert len(bytes_read) <= sum(
        1 + 2 * value.nbytes // 256 for value in hf_values(folder).values()
    )


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_several_hosts_read_each_row_once_and_exchange_the_rest(
    folder: Path, sizes: dict, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that is gone where a mesh spans processes, here by the devices of one."""
    expected = arrays(load_checkpoint(folder))
    bytes_read.clear()
    monkeypatch.setattr(hf_import, "spans_processes", lambda mesh: True)
    mesh = make_mesh(sizes)
    model = load_checkpoint(folder, mesh=mesh)
    assert_same_bits(arrays(model), expected)
    state = nnx.state(model)
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(tree_shardings(mesh, state)), strict=True
    ):
        assert leaf.sharding == sharding
    assert sum(bytes_read) == sum(x.nbytes for x in hf_values(folder).values())


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("number", [0, 3])
def test_a_host_reads_its_own_rows_alone(
    folder: Path, sizes: dict, number: int, bytes_read: list[int]
) -> None:
    """A host with one of eight devices: no device's rows are another's, so that eight hosts read
    the file once; those that cannot be cut are read by all."""
    checkpoint, mesh = HFCheckpoint(folder), make_mesh(sizes)
    for entry in parameter_entries(checkpoint.config):
        sharding = rows_first(parameter_sharding(mesh, entry), entry)
        index = sharding.devices_indices_map(entry.shape)[jax.devices()[number]]
        spans = tuple(axis.indices(size)[:2] for axis, size in zip(index, entry.shape, strict=True))
        bytes_read.clear()
        [values] = read_slices(checkpoint, entry, None, [spans]).values()
        assert sum(bytes_read) == values.nbytes
        whole = read_parameter(checkpoint, entry)
        assert values.tobytes() == whole[tuple(slice(*span) for span in spans)].tobytes()
        if len(entry.hf_shape) == 2 and entry.hf_shape[0] % 8 == 0:
            assert values.size == whole.size // 8, entry.path


# --- export ------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES.values(), ids=MESHES)
def test_from_a_mesh_as_from_one_device(folder: Path, sizes: dict, tmp_path: Path) -> None:
    model = load_checkpoint(folder, mesh=make_mesh(sizes))
    save_checkpoint(model, model.config, tmp_path / "b", shard_bytes=2000)
    names = {path.name for path in (tmp_path / "b").iterdir()}
    assert names == {path.name for path in folder.iterdir()} - {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    for name in names:
        assert (tmp_path / "b" / name).read_bytes() == (folder / name).read_bytes(), name


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path) -> None:
    seen: list[weakref.ref] = []

    def read() -> np.ndarray:
        assert not any(ref() is not None for ref in seen)
        values = np.ones((40, 30), np.float32)
        seen.append(weakref.ref(values))
        return values

    dtype = np.dtype(np.float16)
    tensors = [Tensor(f"t{i}", (40, 30), dtype, read) for i in range(6)]
    write_weights(plan_files(tensors, 2 * 40 * 30 * 2), tmp_path)
    assert len(seen) == 6
    assert len(list(tmp_path.glob("model-0000?-of-00003.safetensors"))) == 3
    assert {x.sum() for x in hf_values(tmp_path).values()} == {1200}


# --- several processes -------------------------------------------------------------------


def together(count: int, model: Transformer, folder: Path) -> list[Exception | None]:
    """`save_checkpoint` by so many processes, which here are threads that share the model."""
    barrier, said = threading.Barrier(count), [False] * count

    def one(index: int) -> Exception | None:
        def all_true(mine: bool) -> bool:
            said[index] = mine
            barrier.wait(60)
            result = all(said)
            barrier.wait(60)
            return result

        try:
            processes = Processes(index, count, all_true)
            save_checkpoint(model, model.config, folder, shard_bytes=2000, processes=processes)
        except Exception as error:
            return error
        assert (folder / "config.json").exists()  # nobody goes on before it is there
        return None

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_processes_share_the_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: dict[str, int] = {}
    write = hf_export.write_safetensors

    def noted(path: Path, *rest: object) -> None:
        writers[path.name] = threading.get_ident()
        write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hf_export, "write_safetensors", noted)
    model = load_checkpoint(folder)
    assert together(3, model, tmp_path / "b") == [None] * 3
    assert len(set(writers.values())) == 3
    assert_same_bits(hf_values(tmp_path / "b"), hf_values(folder))
    assert load_checkpoint(tmp_path / "b").config == model.config
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


@pytest.mark.parametrize("broken", ["model-00001", "model-00002"])
def test_no_process_waits_for_one_that_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """All of them end, the earlier checkpoint stands, and the fault is told by its own."""
    model = load_checkpoint(folder)
    save_checkpoint(model, model.config, tmp_path / "b")
    before = hf_values(tmp_path / "b")
    write = hf_export.write_safetensors

    def full(path: Path, *rest: object) -> None:
        if path.name.startswith(broken):
            raise OSError(28, "No space left on device")
        write(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(hf_export, "write_safetensors", full)
    errors = together(2, model, tmp_path / "b")
    told = sorted(str(error) for error in errors)
    assert "No space left on device" in told[1 if told[0].startswith("/") else 0]
    assert sum("another process of the job failed" in text for text in told) == 1
    assert_same_bits(hf_values(tmp_path / "b"), before)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_place_that_cannot_be_written_ends_all(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "b").write_text("x")
    errors = together(2, load_checkpoint(folder), tmp_path / "b")
    assert all(isinstance(error, InputError) for error in errors)
    assert "is a file" in str(errors[0])
    assert (tmp_path / "b").read_text() == "x"


def test_files_hold_what_was_asked_for() -> None:
    config = tiny_config()
    sizes = [(entry.path, len(entry.hf_names)) for entry in parameter_entries(config)]
    dtype = np.dtype(np.float32)
    tensors = [
        Tensor(f"{path}.{i}", (10,), dtype, lambda: np.zeros(10))
        for path, n in sizes
        for i in range(n)
    ]
    for most in (1, 40, 100, 10**9):
        files = plan_files(tensors, most)
        assert [t for group in files.values() for t in group] == tensors
        assert all(len(g) == 1 or sum(t.nbytes for t in g) <= most for g in files.values())
    assert list(files) == ["model.safetensors"]
