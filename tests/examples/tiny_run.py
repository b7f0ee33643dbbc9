"""A recipe that trains in seconds, and ways to stop it: for the tests of the loop."""

import dataclasses
import importlib
import json
import multiprocessing
import os
import socket
import sys
import time
from pathlib import Path

import jax
import pytest
from omegaconf import OmegaConf

import train.loop
from tests.examples.data import corpus_rows
from train.recipe.config import (
    DataSection,
    LossSection,
    ModelSection,
    OptimizerSection,
    TrainConfig,
    save_config,
)
from train.recipe.fields import apply_override
from wedlm_jax.__main__ import main
from wedlm_jax.sharding import make_mesh

ARCHITECTURE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "qk_norm": True,
    "tie_word_embeddings": True,
    "max_position_embeddings": 256,
}


WALL_CLOCK = {"tokens_per_second", "step_seconds", "input_wait", "goodput"}
"""Numbers that no run repeats."""


def on_devices(monkeypatch, count):
    devices = jax.devices()[:count]
    monkeypatch.setattr(train.loop, "make_mesh", lambda sizes: make_mesh(sizes, devices))


def tiny_recipe(output, tokenizer, **changes):
    """A recipe of four steps on `corpus_rows`, for the tokenizer given or that of its model."""
    config = TrainConfig(
        steps=4,
        rows=2,
        accumulation=2,
        row_length=128,
        block_size=32,
        seed=1,
        output=str(output),
        checkpoint_every=100,
        log_every=1,
        model=ModelSection(architecture=dict(ARCHITECTURE)),
        data=DataSection(tokenizer=str(tokenizer) if tokenizer else None),
        optimizer=OptimizerSection(learning_rate=0.01, warmup_steps=1),
        loss=LossSection(dtype="float32", remat="none", chunk=64),
    )
    config = dataclasses.replace(config, **changes)
    if not config.data.sources:
        rows = _rows(config)
        config.data.sources = {rows: 1.0}
        if config.evaluation.every and config.evaluation.source is None:
            config.evaluation.source = rows
    return config


def changed(config, *overrides):
    """A recipe with fields changed as on the command line; whether they fit is not checked."""
    fields = OmegaConf.structured(config)
    for item in overrides:
        apply_override(fields, item)
    return OmegaConf.to_object(fields)


def _rows(config):
    """Packed rows for the tokenizer of a recipe; a mere name where it has none."""
    given = config.data.tokenizer or config.model.init_from
    if given is None or not (Path(given) / "tokenizer.json").exists():
        return "no rows"
    return str(corpus_rows(Path(given), config.row_length, config.block_size))


def metric_lines(output):
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in WALL_CLOCK} for line in lines]


def run_until_killed(config, last):
    """Trains until the batch of step ``last`` is asked for, and ends there as if from outside."""

    class Killed(Exception):
        pass

    def die():
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        call_before_step(patch, last, die)
        with pytest.raises(Killed):
            train.loop.train(config)


def call_before_step(monkeypatch, step, function):
    """``function`` is called when a run asks for the batch of ``step``."""
    real = train.loop.TrainBatches

    class Watched(real):
        def __init__(self, *arguments, start, **settings):
            super().__init__(*arguments, start=start, **settings)
            self.step = start

        def __next__(self):
            if self.step == step:
                function()
            self.step += 1
            return super().__next__()

    monkeypatch.setattr(train.loop, "TrainBatches", Watched)


def command_in_child(arguments, output, devices=1, environment=None, constants=None, folder=None):
    """`wedlm train` in a process of its own, for `multiprocessing`, whose server has all imported;
    with these ``constants`` ("MODULE.NAME") in ``folder``."""
    with output.open("a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        os.environ.update(environment or {})
        os.chdir(folder or ".")
        for name, value in (constants or {}).items():
            module, _, constant = name.rpartition(".")
            found = importlib.import_module(module)
            assert hasattr(found, constant), f"{name} is not there any more"
            setattr(found, constant, value)
        jax.config.update("jax_num_cpu_devices", devices)
        sys.exit(main(["train", *arguments]))


def start_command(arguments, output, devices=1, **settings):
    """Starts `command_in_child`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.examples.tiny_run"])
    child = context.Process(
        target=command_in_child, args=(arguments, output, devices), kwargs=settings
    )
    child.start()
    return child


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def run_hosts(arguments, said_in, *, limit=300, **settings):
    """Runs `wedlm train` as two processes; returns their statuses and what each said. ``settings``,
    of each: ``arguments_of``, and those of `command_in_child`."""
    address = f"localhost:{free_port()}"
    said = [said_in / f"host{i}.txt" for i in range(2)]
    more = settings.pop("arguments_of", [[], []])
    children = []
    for i in range(2):
        said[i].unlink(missing_ok=True)
        own = {name: values[i] for name, values in settings.items()}
        common = ["--coordinator", address, "--num-processes", "2", "--process-id", str(i)]
        children.append(start_command([*arguments, *common, *more[i]], said[i], **own))
    end = time.monotonic() + limit
    for child in children:
        child.join(max(end - time.monotonic(), 0))
    statuses = [child.exitcode for child in children]
    for child in children:
        child.kill()
    return statuses, [path.read_text() for path in said]


def sentences(said):
    """What the command says as it ends, of all that a process said."""
    return [line for line in said.splitlines() if line.startswith("wedlm train: ")]


def write_recipe(config, folder):
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "recipe.yaml"
    save_config(config, path)
    return path
