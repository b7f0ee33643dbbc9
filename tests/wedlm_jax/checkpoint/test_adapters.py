"""Drafters on disk: what is written is what is read, in every layout, and whose they are."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests.examples.train_step import DIVIDED
from tests.examples.training import tiny_transformer
from wedlm_jax.checkpoint.adapters import base_digest, save_drafter, with_drafter
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.sharding import make_mesh

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), rows="masked")


def whole_model():
    return tiny_transformer(**DIVIDED)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save_checkpoint(whole_model(), whole_model().config, folder)
    return folder


@pytest.fixture(scope="module")
def adapters():
    random = np.random.default_rng(0)
    state = nnx.state(with_adapters(whole_model(), LORA, nnx.Rngs(0)), nnx.LoRAParam)
    return jax.tree.map(lambda x: jax.numpy.asarray(random.normal(size=x.shape), x.dtype), state)


@pytest.fixture(scope="module")
def drafter(adapters, base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "drafter"
    save_drafter(adapters, LORA, folder, base=open_checkpoint(base), dtype="float32")
    return folder


@pytest.mark.parametrize("layout", ["stacked", "apart", "mesh"])
def test_what_is_written_is_read(layout, base, drafter, adapters):
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2]) if layout == "mesh" else None
    model = load_checkpoint(base, mesh=mesh, stacked=layout != "apart")
    made = with_drafter(model, open_checkpoint(base), drafter, mesh)
    assert made.config.has_drafter
    expected = with_adapters(whole_model(), LORA, nnx.Rngs(0))
    nnx.update(expected, adapters)
    if layout == "apart":
        expected = with_layers_apart(expected)
    found, wanted = (dict(nnx.state(x, nnx.LoRAParam).flat_state()) for x in (made, expected))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path][...], value[...], err_msg=str(path))
        if mesh is not None and path[-1] == "b" and path[1] == "self_attn":
            assert len(found[path][...].sharding.device_set) == 2


def test_a_digest_is_of_the_values_not_of_their_dtype(base, tmp_path):
    digest = base_digest(open_checkpoint(base))
    save_checkpoint(whole_model(), whole_model().config, tmp_path / "half", dtype="bfloat16")
    assert base_digest(open_checkpoint(tmp_path / "half")) == digest
    other = whole_model()
    weight = other.layers.self_attn.v_proj.weight
    weight[...] = weight[...].at[1, 0, 3].add(0.5)
    save_checkpoint(other, whole_model().config, tmp_path / "other")
    assert base_digest(open_checkpoint(tmp_path / "other")) != digest
