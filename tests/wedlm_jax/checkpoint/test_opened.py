"""An orbax folder loads as the Hugging Face folder that it was made of, whatever the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.examples.checkpoints import write_tiny
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from wedlm_jax import LLM, SamplingParams
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.hf import arrays_from_model, load_checkpoint
from wedlm_jax.checkpoint.opened import open_checkpoint
from wedlm_jax.errors import InputError
from wedlm_jax.sharding import make_mesh


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("opened")
    convert(write_tiny(folder / "hf", dtype="bfloat16"), folder / "orbax")
    return folder / "hf", folder / "orbax"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"stacked": False, "columns": False},
        {"stacked": False, "columns": True},
        {"dtype": "float32", "mesh": {"fsdp": 2, "tensor": 2}},
    ],
    ids=str,
)
def test_both_formats_load_the_same(folders: tuple[Path, Path], options: dict[str, Any]) -> None:
    if "mesh" in options:
        options = {**options, "mesh": make_mesh(options["mesh"], jax.devices()[:4])}
    hf, orbax = (arrays_from_model(load_checkpoint(folder, **options)) for folder in folders)
    assert hf.keys() == orbax.keys()
    for path, values in hf.items():
        assert values.dtype == orbax[path].dtype, path
        assert values.sharding == orbax[path].sharding, path
        np.testing.assert_array_equal(np.asarray(values), np.asarray(orbax[path]), path)


def test_some_rows_and_columns_of_a_tensor(folders: tuple[Path, Path]) -> None:
    hf, orbax = map(open_checkpoint, folders)
    assert list(orbax.tensors) == [name for name in orbax.tensors if name in hf.tensors]
    assert hf.dtypes() == orbax.dtypes() == {"bfloat16"}
    for name in ("model.layers.1.self_attn.q_proj.weight", "model.norm.weight"):
        ((first, wanted),) = hf.tensors[name].read_rows(name, slice(2, 5))
        ((start, values),) = orbax.tensors[name].read_rows(name, slice(2, 5))
        assert first == start == 2
        np.testing.assert_array_equal(np.asarray(values), wanted)


@pytest.mark.full
def test_an_orbax_folder_decodes(tmp_path: Path) -> None:
    hf = write_tiny_checkpoint(tmp_path / "hf")
    convert(hf, tmp_path / "orbax")
    params = SamplingParams(max_tokens=6)
    answers = [LLM(folder).generate(["the cat"], params) for folder in (hf, tmp_path / "orbax")]
    assert answers[0][0].token_ids == answers[1][0].token_ids


def test_a_damaged_orbax_folder_is_refused(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "orbax").mkdir()
    (tmp_path / "config.json").write_bytes((folders[1] / "config.json").read_bytes())
    with pytest.raises(InputError, match="orbax"):
        load_checkpoint(tmp_path)
