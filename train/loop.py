"""The training loop: resume, step, log, evaluate, save, export."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.data.batches import TrainBatches
from train.distributed import AgreedStop
from train.evaluation import EVALUATION, Evaluation, append_record
from train.metrics import (
    MetricsLog,
    Record,
    Sink,
    StepClock,
    TensorBoard,
    Wandb,
    cut_back,
)
from train.program import (
    abstract_rows,
    abstract_state,
    guard_of,
    objective_of,
    optimizer_of,
    placed_state,
    schedule_of,
)
from train.remat import settled_here
from train.resume import begin_or_resume
from train.skipped_steps import SKIPPED, PendingMetrics
from train.start import held_out_rows, initial_model, tokenizer_folder, training_rows
from train.step import TrainState, make_train_step
from train.step_cost import describe_budget, model_flops, peak_flops
from wedlm_jax.aot.topology import compiler_options
from wedlm_jax.attention import check_runs_on
from wedlm_jax.checkpoint.hf import save_checkpoint
from wedlm_jax.checkpoint.run_folder import describe_run
from wedlm_jax.config import ModelConfig
from wedlm_jax.processes import is_first, say, wait_for_all
from wedlm_jax.sharding import batch_sharding, check_fits, make_mesh


class RunStopped(Exception):
    """The run ended on request, with its state saved.

    Attributes:
      step: completed steps.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step


def train(config: TrainConfig) -> Path:
    """Runs (or resumes) the training that ``config`` describes.

    Returns:
      the folder of the exported Hugging Face checkpoint, ``<output>/hf``.

    Raises:
      InputError: something in the recipe or its files is not right, or too many steps in a row
        had to be skipped.
      RunStopped: SIGTERM came; the state is saved, and the same call goes on from it.
    """
    schedule_of(config)  # refused before anything is made
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    check_runs_on(config.loss.attention, mesh.devices.flat[0].platform)
    output = Path(config.output)
    if is_first():
        output.mkdir(parents=True, exist_ok=True)
    wait_for_all("output")
    folder = tokenizer_folder(config, output)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    begin_or_resume(config, tokenizer, output)
    model = initial_model(config, tokenizer, mesh)
    check_fits(mesh, model.config, rows=config.rows, row_length=config.row_length)
    describe_run(output, model.config, folder)
    graph, parameters = nnx.split(model)
    with jax.set_mesh(mesh):
        config = settled_here(config, model.config, mesh)
        run = TrainingRun(config, mesh, graph, model.config, tokenizer, output)
        parameters = run.run(parameters).parameters  # the moments are not kept for the export
    exported = dataclasses.replace(model.config, model_type="wedlm")
    trained = nnx.merge(graph, parameters)
    save_checkpoint(trained, exported, output / "hf", dtype="float32", tokenizer_from=folder)
    return output / "hf"


class TrainingRun:
    """One attempt at a run: from its newest checkpoint to its last step.

    Args:
      config: the recipe.
      mesh: already set.
      graph, model: of the model.
      tokenizer: for the synthetic corpus.
      output: the run's folder.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        graph: nnx.GraphDef,
        model: ModelConfig,
        tokenizer: Tokenizer,
        output: Path,
    ):
        self._config, self._mesh, self._output = config, mesh, output
        pad = model.pad_token_id or 0
        self._data = training_rows(config, output, tokenizer, pad)
        self._optimizer, objective = optimizer_of(config), objective_of(config, model)
        self._step = make_train_step(
            graph, self._optimizer, objective, schedule=schedule_of(config), guard=guard_of(config)
        )
        self._flops = model_flops(config, model)
        self._tokens = config.accumulation * config.rows * config.row_length
        self._evaluation = None
        if config.evaluation.every:
            held = held_out_rows(config, tokenizer, pad)
            self._evaluation = Evaluation(config, mesh, graph, model, objective, held)

    def run(self, parameters: nnx.State) -> TrainState:
        """Trains from these parameters, or from the newest checkpoint; they are used up."""
        config = self._config
        like = abstract_state(self._mesh, parameters, self._optimizer)
        checkpoints = Checkpoints(
            self._output / "checkpoints", config.keep_checkpoints, config.keep_every
        )
        try:
            state = checkpoints.restore(like, say)
            if state is None:
                state = placed_state(self._mesh, parameters, self._optimizer)
            else:
                say(f"resumed from step {int(state.step)}")
                for leaf in jax.tree.leaves(parameters):
                    leaf.delete()  # the state has its own
            if int(state.step) < config.steps:
                state = self._train(state, checkpoints)
        finally:
            checkpoints.close()
        return state

    def _train(self, state: TrainState, checkpoints: Checkpoints) -> TrainState:
        config, done = self._config, int(state.step)
        key = jax.random.key(config.seed)
        compiled = self._compile(state, key)
        batches = TrainBatches(self._data, config, batch_sharding(self._mesh), start=done)
        clock = StepClock()
        pending = PendingMetrics(self._output, config.optimizer.max_skipped, batches.read_from)
        log = self._open_log(done)
        try:
            with AgreedStop() as stop:
                for step in range(done, config.steps):
                    self._profile(step)
                    waited = batches.input_wait
                    state, metrics = compiled(state, next(batches), key)
                    clock.count(batches.input_wait - waited)
                    pending.add(step + 1, metrics)
                    last = step + 1 == config.steps
                    if last or (step + 1) % config.log_every == 0:
                        record = pending.read()
                        self._log(log, step + 1, record, clock)
                    ends = stop.after(step + 1)
                    if last or ends or (step + 1) % config.checkpoint_every == 0:
                        pending.read()  # what was skipped is on record before the state is
                        checkpoints.save(state)
                    self._evaluate(step + 1, state, clock)
                    if ends and not last:
                        raise RunStopped(step + 1)
        finally:
            batches.close()
            if log is not None:
                log.close()
        return state

    def _compile(self, state: TrainState, key: jax.Array) -> Any:
        """The step, compiled before the clock runs, and what it takes of the memory."""
        if not hasattr(self._step, "lower"):
            return self._step
        started = time.monotonic()
        rows = abstract_rows(self._config, self._mesh)
        options = compiler_options(jax.devices()[0].device_kind)
        compiled = self._step.lower(state, rows, key).compile(compiler_options=options or None)
        say(f"compiled in {time.monotonic() - started:.0f} s; {describe_budget(state, compiled)}")
        return compiled

    def _open_log(self, done: int) -> MetricsLog | None:
        if not is_first():
            return None
        config, sinks = self._config, list[Sink]()
        for name in (SKIPPED, EVALUATION):  # what is done again is told again
            cut_back(self._output / name, done)
        if config.metrics.tensorboard:
            sinks.append(TensorBoard(self._output / "tensorboard", done))
        if config.metrics.wandb:
            settings = dataclasses.asdict(config)
            sinks.append(Wandb(config.metrics.wandb, self._output, settings))
        return MetricsLog(self._output, config.steps, done, config.objective, sinks)

    def _log(self, log: MetricsLog | None, step: int, record: Record, clock: StepClock) -> None:
        speed = clock.read(self._tokens)
        devices = self._mesh.devices.flat
        if (peak := peak_flops(devices[0])) is not None:
            record["mfu"] = self._flops / speed["step_seconds"] / (peak * len(devices))
        if used := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
            record["memory_peak_bytes"] = used
        if log is not None:
            log.write(step, record | speed)

    def _evaluate(self, step: int, state: TrainState, clock: StepClock) -> None:
        every = self._config.evaluation.every
        if self._evaluation is None or (step % every and step != self._config.steps):
            return
        record = self._evaluation.run(state.parameters)
        append_record(self._output, step, record)
        say(f"held out, step {step}: " + " ".join(f"{k} {v:.4g}" for k, v in record.items()))
        clock.restart()

    def _profile(self, step: int) -> None:
        first, count = self._config.metrics.profile_from, self._config.metrics.profile_steps
        if count and step == first:
            jax.profiler.start_trace(str(self._output / "profile"))
        if count and step == first + count:
            jax.profiler.stop_trace()
            say(f"profile of steps {first} to {step - 1} in {self._output / 'profile'}")
