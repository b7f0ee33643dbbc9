"""Runs every golden check on a folder in the goldens' format, a line a case.

    python -m tests.check_goldens tests/goldens

A folder holds one folder per checkpoint, each with ``config.json``, safetensors,
``forward.npz``, ``decode_cases.json`` and ``train_case_*.npz``; see tests/goldens/README.md.
Exits non-zero on any miss. Each check compares against the tolerance the goldens state.
"""

import dataclasses
import functools
import itertools
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from train.step import Objective, accumulate, prepare_given
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.names import arrays_from_model, parameter_entries
from wedlm_jax.corruption import PackedRows
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request, Traced
from wedlm_jax.errors import InputError
from wedlm_jax.loss import LossConfig
from wedlm_jax.masks import CausalMask
from wedlm_jax.packing import TokenisedSample, row_arrays
from wedlm_jax.params import SamplingParams

LOGITS_TOLERANCE = 1e-4
LOSS_TOLERANCE = 1e-5
GRADIENT_TOLERANCE = 1e-4


def all_checks(folder):
    """Every check of every checkpoint under ``folder``."""
    checkpoints = sorted(path.parent for path in folder.glob("*/config.json"))
    if not checkpoints:
        raise InputError(f"{folder}: no checkpoint folders with a config.json in here")
    for checkpoint in checkpoints:
        model = load_checkpoint(checkpoint, dtype=jnp.float32)
        for name, problem in checkpoint_checks(checkpoint, model):
            yield f"{checkpoint.name}/{name}", problem


def checkpoint_checks(checkpoint, model):
    yield "forward", check_forward(model, checkpoint / "forward.npz")
    cases = read_decode_cases(checkpoint)
    yield from check_decode(model, cases)
    for path in sorted(checkpoint.glob("train_case_*.npz")):
        with np.load(path) as file:
            yield from check_train(model, dict(file), path.stem)


def check_forward(model, path):
    with np.load(path) as golden:
        tokens, positions = jnp.asarray(golden["token_ids"]), jnp.asarray(golden["positions"])
        logits = jax.jit(lambda model: model.logits(model(tokens, positions, CausalMask())))(model)
        return _far(logits, golden["logits"], LOGITS_TOLERANCE)


def read_decode_cases(checkpoint):
    return json.loads((checkpoint / "decode_cases.json").read_text(encoding="utf-8"))


def as_request(golden, number=0):
    params = SamplingParams(
        mode="paper",
        max_tokens=golden["max_tokens"],
        entropy_threshold=golden["entropy_threshold"],
        position_penalty=golden["pos_penalty_factor"],
        stop_token_ids=tuple(golden["stop_token_ids"]),
    )
    return Request(number, golden["prompt_token_ids"], params, golden["window_size"])


COUNTS = ("token_ids", "num_forwards", "num_token_instances")


def check_decode(model, goldens):
    """Each case alone, all as one batch of mixed windows, and the traces."""
    batch = decode_cases(model, goldens)
    for i, golden in enumerate(goldens):
        expected = {name: golden[name] for name in COUNTS}
        yield f"decode[{i}] alone", _differs(decode_cases(model, [golden])[0], expected)
        yield f"decode[{i}] in a batch", _differs(batch[i], expected)
        if "trace" in golden:
            trace = {"trace": decode_trace(model, golden)}
            yield f"decode[{i}] trace", _differs(trace, {"trace": golden["trace"]})


def check_train(model, golden, name):
    block_size, mask_token_id = int(golden["block_size"]), int(golden["mask_token_id"])
    rows, masked, ratio, layout = packed_rows(golden, block_size)
    graph, parameters = nnx.split(model)

    def prepared(weighting):
        config = LossConfig(weighting=weighting, chunk=16, remat="gate")
        objective = Objective("wedlm", block_size, mask_token_id, config)
        return prepare_given(objective, rows, masked, ratio)

    gradients, metrics = jax.jit(accumulate, static_argnums=(0, 4))(
        graph, parameters, *prepared("inverse_ratio")
    )
    batches, denominators, loss = prepared("uniform")
    batch = jax.tree.map(lambda x: x[0], batches)
    uniform = jax.jit(loss)(model, batch, denominators)[1]
    yield f"{name} packed arrays", check_packed(batch, golden, layout)
    yield f"{name} logits", check_logits(model, batch, golden, layout)

    for key, value in {
        "mlm_loss_weighted": metrics["mlm_loss"],
        "mlm_loss_uniform": uniform["mlm_loss"],
        "ar_loss": metrics["ar_loss"],
        "total_loss": metrics["loss"],
    }.items():
        yield f"{name} {key}", _far(value, golden[key], LOSS_TOLERANCE, relative=True)
    yield from check_gradients(nnx.merge(graph, gradients), golden, name)


def packed_rows(golden, block_size):
    """The case as one packed row ``[1, 1, L]``, and which place of ours each of its ``[2N]``
    has."""
    bounds = golden["cu_seqlens"]
    samples, where, start = [], [], 0
    for low, high in itertools.pairwise(bounds):
        samples.append(TokenisedSample(golden["tokens"][low:high], golden["labels"][low:high] >= 0))
        where.append(start + np.arange(high - low))
        start += -(-int(high - low) // block_size) * block_size
    row = row_arrays(samples, row_length=start, block_size=block_size, pad_token_id=0)
    rows = PackedRows(**{key: jnp.asarray(value)[None, None] for key, value in row.items()})
    flat = np.concatenate(where)
    masked, ratio = np.zeros(start, bool), np.zeros(start, np.float32)
    masked[flat], ratio[flat] = golden["masked"], golden["mask_ratio"]
    layout = np.concatenate([np.concatenate([w, w + start]) for w in where])
    return rows, jnp.asarray(masked)[None, None], jnp.asarray(ratio)[None, None], layout


def check_packed(batch, golden, layout):
    length = batch.targets.shape[1]
    memory = np.zeros(length, bool)
    targets = np.concatenate([batch.token_ids[0, :length], batch.targets[0]])
    is_masked = np.concatenate([memory, batch.masked[0]])
    ratio = np.where(is_masked, np.concatenate([memory * 0.0, batch.mask_ratio[0]]), 0.0)
    ours = {
        "packed_input_ids": batch.token_ids[0],
        "packed_positions": batch.positions[0],
        "packed_targets": targets,
        "packed_masked": is_masked,
        "packed_mask_ratio": ratio,
    }
    for key, value in ours.items():
        theirs = golden[key].reshape(-1)
        if not np.allclose(np.asarray(value)[layout], theirs, rtol=0, atol=1e-6):
            return f"{key} differs"
    if "attention_mask" in golden:
        dense = np.asarray(batch.mask.dense()[0])[np.ix_(layout, layout)]
        if not np.array_equal(dense, golden["attention_mask"].astype(bool)):
            return "attention_mask differs"
    return None


def check_logits(model, batch, golden, layout):
    @partial(jax.jit, static_argnames="attention")
    def logits_of(model, attention):
        hidden = model(batch.token_ids, batch.positions, batch.mask, attention=attention)
        return model.logits(hidden)[0]

    for attention in ("dense", "streams"):
        logits = np.asarray(logits_of(model, attention))[layout]
        theirs = golden["logits"].reshape(logits.shape)
        if problem := _far(logits, theirs, LOGITS_TOLERANCE):
            return f"{attention} attention: {problem}"
    return None


def check_gradients(gradients, golden, name):
    """Norms of every parameter's gradient; values of those the goldens hold."""
    values = arrays_from_model(gradients)
    ours = {}
    for entry in parameter_entries(gradients.config):
        value = np.asarray(values[entry.path], np.float64)
        parts = value if entry.stacked else value[None]
        for tensor, part in zip(entry.hf_names, parts, strict=True):
            ours[tensor] = part
    norms = [key for key in golden if key.startswith("gradnorm/")]
    missed = {key.split("/", 1)[1] for key in norms} ^ set(ours)
    yield f"{name} gradients", f"not the same parameters: {sorted(missed)}" if missed else None
    for key in norms:
        norm = np.linalg.norm(ours[key.split("/", 1)[1]])
        yield f"{name} {key}", _far(norm, golden[key], GRADIENT_TOLERANCE, relative=True)
    for key in (key for key in golden if key.startswith("grad/")):
        value = ours[key.split("/", 1)[1]]
        scale = np.abs(golden[key]).max()
        yield f"{name} {key}", _far(value / scale, golden[key] / scale, GRADIENT_TOLERANCE)


def _far(ours, theirs, tolerance, *, relative=False):
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    error = np.abs(ours - theirs)
    error = (error / np.maximum(np.abs(theirs), 1e-30) if relative else error).max()
    return None if error <= tolerance else f"off by {error:.2e}, allowed {tolerance:.0e}"


def _differs(ours, theirs):
    wrong = [
        f"{key} {ours[key]}, expected {theirs[key]}" for key in theirs if ours[key] != theirs[key]
    ]
    return "; ".join(wrong) or None


@functools.lru_cache(maxsize=32)
def _engine(model, window, sequences, chunk_tokens=32):
    """Kept, because an engine keeps its compiled programs: cases of equal shapes share them."""
    sizes = {"max_batch_size": sequences, "chunk_tokens": chunk_tokens}
    return Engine(model, EngineConfig(window_size=window, lookup=0, **sizes))


def decode_cases(model, goldens):
    """All cases as one batch, each sequence with its own window."""
    requests = [as_request(golden, i) for i, golden in enumerate(goldens)]
    engine = _engine(model, max(request.window for request in requests), len(requests))
    return [dataclasses.asdict(result) for result in engine.decode(requests)]


def decode_trace(model, golden):
    """Forward by forward: the window in physical order and the run that the forward commits."""
    # The prompt in one chunk: each forward then runs the window.
    engine = _engine(model, golden["window_size"], 1, chunk_tokens=128)
    mask = model.config.require_mask_token_id()
    trace = []
    events = engine.step([dataclasses.replace(as_request(golden), traced=True)])
    while events or engine.has_work:
        for event in events:
            if isinstance(event, Traced):
                held, start = event.forward.held, event.forward.start
                order = sorted(range(len(held)), key=lambda slot: held[slot] is None)
                # The goldens' runs do not end at a stop token.
                run = list(itertools.takewhile(lambda token: token is not None, held))
                assert event.committed == run[: len(event.committed)]
                trace.append(
                    {
                        "physical_tokens": [mask if held[s] is None else held[s] for s in order],
                        "logical_positions": [start + s for s in order],
                        "committed": run,
                    }
                )
        events = engine.step() if engine.has_work else []
    return trace


def main(arguments):
    if len(arguments) != 1:
        print(__doc__)
        return 2
    failures = total = 0
    try:
        for name, problem in all_checks(Path(arguments[0])):
            total += 1
            failures += problem is not None
            print(f"ok   {name}" if problem is None else f"MISS {name}: {problem}")
    except (InputError, OSError, KeyError) as error:
        print(f"check_goldens: {error}")
        return 2
    print(f"{total - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
