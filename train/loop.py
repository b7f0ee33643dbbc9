"""The training loop: resume, step, log, evaluate, save, export."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.data.batches import TrainBatches
from train.data.samples import load_tokenizer
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
from train.program import TrainProgram, make_program, schedule_of
from train.resume import begin_or_resume
from train.run_files import RunFiles, open_output
from train.skipped_steps import SKIPPED, PendingMetrics, TooManySkipped
from train.start import (
    check_start,
    held_out_rows,
    recipe_model,
    starting_state,
    tokenizer_folder,
    training_rows,
)
from train.step import TrainState, forgiven
from train.step_cost import describe_budget, model_flops, peak_flops
from wedlm_jax.attention import check_runs_on
from wedlm_jax.checkpoint.hf import save_checkpoint
from wedlm_jax.checkpoint.model_folder import RUN_STATES
from wedlm_jax.checkpoint.run_folder import describe_run, is_described
from wedlm_jax.processes import is_first, say
from wedlm_jax.sharding import batch_sharding, make_mesh


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
        had to be skipped; then the state is saved.
      RunStopped: SIGTERM came; the state is saved, and the same call goes on from it.
    """
    schedule_of(config)  # refused before anything is made
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    check_runs_on(config.loss.attention, mesh.devices.flat[0].platform)
    output = open_output(config.output)
    files = RunFiles(output)
    checkpoints = Checkpoints(output / RUN_STATES, config.keep_checkpoints, config.keep_every)
    try:
        resumes = bool(checkpoints.steps())
        folder = tokenizer_folder(config, output, resumes=resumes)
        tokenizer = load_tokenizer(folder)
        if not resumes:
            check_start(config)
        model = recipe_model(config, tokenizer, output if resumes else None)
        program = make_program(config, model, mesh)
        begin_or_resume(config, tokenizer, output, resumes=resumes)
        if not (resumes and is_described(output, model)):
            describe_run(output, model, folder)
        with jax.set_mesh(mesh):
            parameters = TrainingRun(program, tokenizer, output, files).run(checkpoints)
    finally:
        checkpoints.close()
        files.close()
    exported = dataclasses.replace(model, model_type="wedlm")
    trained = nnx.merge(program.graph, parameters)
    save_checkpoint(trained, exported, output / "hf", dtype="float32", tokenizer_from=folder)
    return output / "hf"


class TrainingRun:
    """One attempt at a run: from its newest checkpoint to its last step.

    Args:
      program: of the recipe; its mesh is already set.
      tokenizer: for the synthetic corpus.
      output: the run's folder.
      files: where its logs are written.
    """

    def __init__(self, program: TrainProgram, tokenizer: Tokenizer, output: Path, files: RunFiles):
        config, model = program.config, program.model
        self._program, self._config = program, config
        self._files, self._output = files, files.folder
        self._mesh = program.mesh
        pad = model.pad_token_id or 0
        self._data = training_rows(config, output, tokenizer, pad)
        self._flops = model_flops(config, model)
        self._tokens = config.accumulation * config.rows * config.row_length
        self._evaluation = None
        if config.evaluation.every:
            held = held_out_rows(config, tokenizer, pad)
            self._evaluation = Evaluation(
                config, program.mesh, program.graph, model, program.objective, held
            )

    def run(self, checkpoints: Checkpoints) -> nnx.State:
        """Trains to the last step; returns the parameters. The moments are not kept."""
        compiled = self._compile()
        state = starting_state(self._program, checkpoints)
        if int(state.step) < self._config.steps:
            state = self._train(compiled, state, checkpoints)
        return state.parameters

    def _train(self, compiled: Any, state: TrainState, checkpoints: Checkpoints) -> TrainState:
        config, done = self._config, int(state.step)
        key = self._program.mask_key()
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
                        self._save(checkpoints, state)
                    self._evaluate(step + 1, state, clock)
                    if ends and not last:
                        raise RunStopped(step + 1)
        except TooManySkipped:
            # Behind the steps that were skipped: a restart does not come to the same end.
            self._save(checkpoints, forgiven(state))
            raise
        finally:
            batches.close()
            if log is not None:
                log.close()
        return state

    def _save(self, checkpoints: Checkpoints, state: TrainState) -> None:
        self._files.publish()  # what is logged up to a state is there when the state is
        checkpoints.save(state)

    def _compile(self) -> Any:
        """The step, compiled before a weight is read, and what it takes of the memory."""
        started = time.monotonic()
        compiled = self._program.lower().compile()
        budget = describe_budget(self._program.state, compiled)
        say(f"compiled in {time.monotonic() - started:.0f} s; {budget}")
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
