"""Every golden case: figures of the paper's authors' own code; see tests/goldens/README.md."""

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compiler

from tests import check_goldens
from tests.check_goldens import (
    COUNTS,
    as_request,
    check_forward,
    check_train,
    decode_cases,
    decode_trace,
    read_decode_cases,
)
from tests.forward_sizes import two_sizes, usual_sizes
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine

GOLDENS = Path(__file__).parent / "goldens"
CHECKPOINTS = ("qwen2_style", "qwen3_style")
DECODE_CASES = {name: read_decode_cases(GOLDENS / name) for name in CHECKPOINTS}
TRAIN_CASES = [(name, i) for name in CHECKPOINTS for i in range(5)]


@pytest.fixture(scope="class")
def compiled_as_for_users():
    """With LLVM's expensive passes and XLA's newer emitters; see conftest.py."""
    name = "jax_disable_most_optimizations"
    before, options_of = jax.config.values[name], compiler.get_compile_options

    def with_emitters(*arguments, env_options_overrides=None, **others):
        flags = dict(env_options_overrides or {})
        if "xla_cpu_use_fusion_emitters" in os.environ.get("XLA_FLAGS", ""):
            flags["xla_cpu_use_fusion_emitters"] = True
        return options_of(*arguments, env_options_overrides=flags, **others)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", with_emitters)
        jax.config.update(name, False)
        jax.clear_caches()  # what was traced is kept with its program
        yield
        jax.config.update(name, before)
    jax.clear_caches()


full = pytest.mark.full


@pytest.fixture(scope="module")
def models():
    return {name: load_checkpoint(GOLDENS / name, dtype=jnp.float32) for name in CHECKPOINTS}


@pytest.fixture(scope="module", params=CHECKPOINTS)
def decoder(request, models):
    """The cases of a checkpoint, and one engine, as wide as the widest of them."""
    cases = DECODE_CASES[request.param]
    widest = max(case["window_size"] for case in cases)
    # Of one checkpoint at the sizes that users get; each takes its time to compile.
    with usual_sizes() if request.param == "qwen3_style" else two_sizes():
        engine = Engine(
            models[request.param],
            EngineConfig(
                window_size=widest, lookup=0, max_batch_size=4, max_model_len=256, chunk_tokens=32
            ),
        )
        engine.expect([as_request(case).params for case in cases])
        engine.compile()
    return cases, engine


def counted(result):
    found = result if isinstance(result, dict) else vars(result)
    return {name: found[name] for name in COUNTS}


def test_all_cases_are_here():
    assert sum(map(len, DECODE_CASES.values())) == 48
    assert len(list(GOLDENS.glob("*/train_case_*.npz"))) == len(TRAIN_CASES)


def test_decodes_one_by_one(decoder):
    cases, engine = decoder
    for i, golden in enumerate(cases):
        (result,) = engine.decode([as_request(golden, i)])
        assert counted(result) == counted(golden), f"case {i}"


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_decodes_in_any_order(decoder, seed):
    """Runs in places and pages used before, with prompts in chunks and prefixes from the cache."""
    cases, engine = decoder
    order = np.random.default_rng(seed).permutation(len(cases))
    results = engine.decode([as_request(cases[i], int(i)) for i in order])
    for result, i in zip(results, order, strict=True):
        assert counted(result) == counted(cases[i]), f"case {i}"


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_traces(models, name):
    traced = [golden for golden in DECODE_CASES[name] if "trace" in golden]
    assert len(traced) == 3
    for golden in traced:
        assert decode_trace(models[name], golden) == golden["trace"]


@pytest.mark.parametrize(
    ("name", "i"),
    [
        pytest.param(*case, marks=[] if case in (("qwen2_style", 0), ("qwen3_style", 1)) else full)
        for case in TRAIN_CASES
    ],
)
def test_training_batch(models, name, i):
    """Packed arrays, logits, losses, and the gradient norm of every parameter."""
    with np.load(GOLDENS / name / f"train_case_{i}.npz") as file:
        golden = dict(file)
    checks = list(check_train(models[name], golden, f"train_case_{i}"))
    assert [check for check in checks if check[1]] == []
    figures = [key for key in golden if key.startswith(("gradnorm/", "grad/"))]
    assert len(checks) == len(figures) + 7


of_each = pytest.mark.parametrize("name", [pytest.param("qwen2_style", marks=full), "qwen3_style"])


@pytest.mark.usefixtures("compiled_as_for_users")
class TestAsUsersCompile:
    @of_each
    def test_forward_logits(self, models, name):
        assert check_forward(models[name], GOLDENS / name / "forward.npz") is None

    @of_each
    def test_decodes_as_one_mixed_batch(self, models, name):
        cases = DECODE_CASES[name]
        results = decode_cases(models[name], cases)
        assert [counted(result) for result in results] == [counted(golden) for golden in cases]

    @full
    @pytest.mark.parametrize(("name", "i"), [("qwen2_style", 0), ("qwen3_style", 0)])
    def test_training_batch(self, models, name, i):
        test_training_batch(models, name, i)


@full
def test_the_command_finds_each_corrupted_figure(tmp_path, capsys):
    """In a copy of one checkpoint, with decode cases that compile fast."""
    source, copy = GOLDENS / "qwen2_style", tmp_path / "goldens" / "qwen2_style"
    copy.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, copy / name)
    with np.load(source / "forward.npz") as file:
        forward = dict(file)
    forward["logits"][0, 3, 5] += 3e-4
    np.savez(copy / "forward.npz", **forward)
    cases = [case for case in read_decode_cases(source) if case["window_size"] == 1][:3]
    cases[0]["token_ids"][-1] += 1
    cases[2]["num_token_instances"] += 1
    (copy / "decode_cases.json").write_text(json.dumps(cases), encoding="utf-8")
    with np.load(source / "train_case_0.npz") as file:
        training = dict(file)
    norm = "gradnorm/model.norm.weight"
    training["ar_loss"] *= 1 + 3e-5
    training["packed_positions"].flat[0] += 1
    training[norm] *= 1 + 3e-4
    np.savez(copy / "train_case_0.npz", **training)

    assert check_goldens.main([str(copy.parent)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("MISS")] == [
        f"MISS qwen2_style/{name}"
        for name in (
            "forward",
            "decode[0] alone",
            "decode[0] in a batch",
            "decode[2] alone",
            "decode[2] in a batch",
            "train_case_0 packed arrays",
            "train_case_0 ar_loss",
            f"train_case_0 {norm}",
        )
    ]
    assert lines[-1].endswith(" passed, 8 failed")


def test_the_command_says_one_sentence_on_a_missing_folder(tmp_path, capsys):
    missing = tmp_path / "nowhere"
    assert check_goldens.main([str(missing)]) == 2
    output = capsys.readouterr().out
    assert output.count("\n") == 1
    assert str(missing) in output
