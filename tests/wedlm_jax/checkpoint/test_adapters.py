"""Adapters on disk. A folder of LoRA adapters is the model that they make, wherever a model can
stand; of drafters what is written is what is read, in every layout, and whose they are."""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.examples.checkpoints import (
    assert_same_bits,
    hf_values,
    model_arrays,
    refused,
    write_tiny,
)
from tests.examples.tiny_checkpoint import write_tiny_checkpoint
from tests.examples.train_step import DIVIDED
from tests.examples.training import tiny_transformer
from wedlm_jax import LLM
from wedlm_jax.checkpoint import ADAPTER_CONFIG as CONFIG
from wedlm_jax.checkpoint.adapters import ADAPTER_WEIGHTS as WEIGHTS
from wedlm_jax.checkpoint.adapters import base_digest, save_drafter, with_drafter
from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.info import describe
from wedlm_jax.checkpoint.model import load_checkpoint, save_checkpoint
from wedlm_jax.checkpoint.open import open_checkpoint
from wedlm_jax.model.layer_layout import with_layers_apart
from wedlm_jax.model.lora import LoraConfig, with_adapters
from wedlm_jax.sharding import make_mesh

RANK, ALPHA = 3, 6.0
MATRICES = ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "lm_head")
PREFIX = "base_model.model."


def write_adapters(folder, base, *, matrices=MATRICES, suffix="", size=1.0, **changes):
    random = np.random.default_rng(0)
    folder.mkdir()
    shapes = {name: open_checkpoint(base).tensors[f"{name}.weight"].shape for name in matrices}
    parts = {}
    for name, (n_out, n_in) in shapes.items():
        for part, shape in (("A", (RANK, n_in)), ("B", (n_out, RANK))):
            values = (size * random.normal(size=shape)).astype(np.float32)
            parts[f"{PREFIX}{name}.lora_{part}{suffix}.weight"] = values
    save_file(parts, folder / WEIGHTS)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    config |= {"base_model_name_or_path": str(base), "target_modules": ["q_proj"], **changes}
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder


def set_base(folder, base):
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    config["base_model_name_or_path"] = base
    (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("peft") / "base", attention_bias=True)


@pytest.fixture
def adapters(base, tmp_path):
    return write_adapters(tmp_path / "适配器", base)


def expected_values(base, adapters, scale):
    values, parts = hf_values(base), load_file(adapters / WEIGHTS)
    for name in MATRICES:
        a, b = (parts[f"{PREFIX}{name}.lora_{part}.weight"] for part in "AB")
        values[f"{name}.weight"] = values[f"{name}.weight"] + scale * (b @ a)
    return values


@pytest.mark.parametrize("changes", [{}, {"use_rslora": True}], ids=str)
def test_it_converts_to_what_merging_by_hand_gives(base, tmp_path, changes):
    adapters = write_adapters(tmp_path / "adapters", base, **changes)
    scale = ALPHA / (RANK**0.5 if changes else RANK)
    expected = expected_values(base, adapters, scale)
    convert(adapters, tmp_path / "merged")
    merged = hf_values(tmp_path / "merged")
    assert merged.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(merged[name], values, rtol=1e-6, atol=1e-6, err_msg=name)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "merged" / name).read_bytes() == (base / name).read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        {"stacked": False},
        {"dtype": "bfloat16", "quantization": "int8"},
        {"mesh": {"fsdp": 2, "tensor": 2}},
    ],
    ids=str,
)
def test_it_loads_as_its_merged_copy(adapters, tmp_path, options):
    convert(adapters, tmp_path / "merged")
    if "mesh" in options:
        options = {**options, "mesh": make_mesh(options["mesh"], jax.devices()[:4])}
    folders = adapters, tmp_path / "merged"
    assert_same_bits(*(model_arrays(load_checkpoint(folder, **options)) for folder in folders))


def test_some_rows_of_a_merged_matrix(base, adapters):
    name = f"{MATRICES[0]}.weight"
    ((first, rows),) = open_checkpoint(adapters).tensors[name].read_rows(slice(2, 5))
    assert first == 2
    whole = expected_values(base, adapters, ALPHA / RANK)[name]
    np.testing.assert_allclose(rows, whole[2:5], rtol=1e-6, atol=1e-6)


def test_it_has_the_tokenizer_of_its_base(tmp_path):
    base, folder = write_tiny_checkpoint(tmp_path / "base"), tmp_path / "adapters"
    matrices = [f"model.layers.0.self_attn.{x}_proj" for x in "qv"]
    write_adapters(folder, base, matrices=matrices, suffix=".default")
    # The base's path may count from the folder of the adapters.
    set_base(folder, "../base")
    assert describe(folder)["format"] == "peft"
    assert describe(folder)["tokenizer"]["present"]
    convert(folder, tmp_path / "merged")
    found, expected = (hf_values(x) for x in (tmp_path / "merged", base))
    changed = [name for name, value in found.items() if (value != expected[name]).any()]
    assert sorted(changed) == [f"{name}.weight" for name in matrices]
    codecs = [LLM(x, max_batch_size=1, max_model_len=64).codec for x in (folder, base)]
    assert codecs[0].encode("the cat") == codecs[1].encode("the cat")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"peft_type": "IA3"}, "peft_type, not 'IA3'"),
        ({"use_dora": True}, "use_dora True"),
        ({"bias": "all"}, "bias 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
        ({"r": 0}, "above 0 as r, not 0"),
        ({"r": RANK + 1}, "have rank 3, but adapter_config.json says r 4"),
        ({"lora_alpha": "16"}, "lora_alpha, not '16'"),
        ({"base_model_name_or_path": None}, "does not name the base"),
        (
            {"base_model_name_or_path": "/nowhere/at/all"},
            "its base model: /nowhere/at/all: no such folder",
        ),
        ({"base_model_name_or_path": "../adapters"}, "is also a folder of adapters"),
        ({"wedlm": {"rows": "masked"}}, "a drafter"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_refused(base, tmp_path, changes, words):
    folder = write_adapters(tmp_path / "adapters", base, **changes)
    with refused(words):
        open_checkpoint(folder)


A, B = f"{PREFIX}lm_head.lora_A.weight", f"{PREFIX}lm_head.lora_B.weight"
FIVE_COLUMNS = np.zeros((RANK, 5), np.float32)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        (A, None, "has only lora_B"),
        (A, FIVE_COLUMNS, "do not fit"),
        (f"{PREFIX}model.norm.lora_A.weight", FIVE_COLUMNS, "has only"),
        (f"{PREFIX}model.embed_tokens.lora_embedding_A", FIVE_COLUMNS, "not a LoRA A or B matrix"),
        (
            B,
            np.full((24, RANK), np.nan, np.float32),
            "lora_B.weight' has values that are not",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_or_are_not_finite_are_named(
    adapters, tmp_path, name, values, words
):
    tensors = {**load_file(adapters / WEIGHTS), name: values}
    save_file({name: x for name, x in tensors.items() if x is not None}, adapters / WEIGHTS)
    with refused(adapters / WEIGHTS, words):
        convert(adapters, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_adapters_of_another_model_and_files_cut_off(adapters, tmp_path):
    other = write_tiny(tmp_path / "other", num_hidden_layers=1)
    set_base(adapters, str(other))
    with refused("model.layers.1.mlp.down_proj.weight", "not a matrix of the base"):
        open_checkpoint(adapters)
    for name in (WEIGHTS, CONFIG):
        (adapters / name).write_bytes((adapters / name).read_bytes()[:-100])
        with refused(adapters / name):
            open_checkpoint(adapters)


# --- drafters ----------------------------------------------------------------------------

LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "down_proj"), rows="masked")


def whole_model():
    return tiny_transformer(**DIVIDED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    save_checkpoint(whole_model(), whole_model().config, folder)
    return folder


@pytest.fixture(scope="module")
def trained():
    random = np.random.default_rng(0)
    state = nnx.state(with_adapters(whole_model(), LORA, nnx.Rngs(0)), nnx.LoRAParam)
    return jax.tree.map(lambda x: jax.numpy.asarray(random.normal(size=x.shape), x.dtype), state)


@pytest.fixture(scope="module")
def drafter(trained, whole, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters") / "drafter"
    save_drafter(trained, LORA, folder, base=open_checkpoint(whole), dtype="float32")
    return folder


@pytest.mark.parametrize("layout", ["stacked", "apart", "mesh"])
def test_what_is_written_is_read(layout, whole, drafter, trained):
    mesh = make_mesh({"tensor": 2}, jax.devices()[:2]) if layout == "mesh" else None
    model = load_checkpoint(whole, mesh=mesh, stacked=layout != "apart")
    made = with_drafter(model, open_checkpoint(whole), drafter, mesh)
    assert made.config.has_drafter
    expected = with_adapters(whole_model(), LORA, nnx.Rngs(0))
    nnx.update(expected, trained)
    if layout == "apart":
        expected = with_layers_apart(expected)
    found, wanted = (dict(nnx.state(x, nnx.LoRAParam).flat_state()) for x in (made, expected))
    assert found.keys() == wanted.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(found[path][...], value[...], err_msg=str(path))
        if mesh is not None and path[-1] == "b" and path[1] == "self_attn":
            assert len(found[path][...].sharding.device_set) == 2


def test_a_digest_is_of_the_values_not_of_their_dtype(whole, tmp_path):
    digest = base_digest(open_checkpoint(whole))
    save_checkpoint(whole_model(), whole_model().config, tmp_path / "half", dtype="bfloat16")
    assert base_digest(open_checkpoint(tmp_path / "half")) == digest
    other = whole_model()
    weight = other.layers.self_attn.v_proj.weight
    weight[...] = weight[...].at[1, 0, 3].add(0.5)
    save_checkpoint(other, whole_model().config, tmp_path / "other")
    assert base_digest(open_checkpoint(tmp_path / "other")) != digest
