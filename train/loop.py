"""The training loop: resume, step, log, evaluate, save, export."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from tokenizers import Tokenizer

from train.checkpoint import Checkpoints
from train.config import TrainConfig
from train.data.phased import PhasedBatches
from train.distributed import AgreedStop
from train.evaluation import EVALUATION, Evaluation, append_record
from train.optimizer import averaged_parameters
from train.phases import phases_of
from train.program import (
    abstract_rows,
    abstract_state,
    guard_of,
    objective_of,
    optimizer_of,
    placed_state,
)
from train.resume import begin_or_resume
from train.schedule import schedule_of
from train.start import held_out_rows, initial_model, tokenizer_folder, training_rows
from train.step import TrainState, make_train_step
from train.step_cost import describe_budget, model_flops, peak_flops
from train.watch.boards import check_boards, open_boards
from train.watch.log import MetricsLog
from train.watch.pending import SKIPPED, PendingMetrics, TooManySkipped
from train.watch.profile import Profiler
from train.watch.records import Record, cut_back
from train.watch.run_time import RunTime
from train.watch.stall import StallWatch
from wedlm_jax.attention import check_runs_on
from wedlm_jax.checkpoint.hf import save_checkpoint
from wedlm_jax.checkpoint.run_folder import describe_run
from wedlm_jax.config import ModelConfig
from wedlm_jax.processes import is_first, say, wait_for_all
from wedlm_jax.sharding import batch_sharding, check_fits, make_mesh
from wedlm_jax.signals import TERMINATED


class RunStopped(Exception):
    """The run ended on request, with its state saved.

    Attributes:
      step: completed steps.
      status: for the process to exit with.
    """

    def __init__(self, step: int, status: int = TERMINATED):
        super().__init__(f"stopped after step {step}")
        self.step, self.status = step, status


def train(config: TrainConfig) -> Path:
    """Runs (or resumes) the training that ``config`` describes.

    Returns:
      the folder of the exported Hugging Face checkpoint, ``<output>/hf``.

    Raises:
      InputError: something in the recipe or its files is not right, or too many steps in a row
        had to be skipped.
      RunStopped: SIGTERM or Ctrl-C came; the state is saved, and the same call goes on from it.
    """
    time = RunTime()
    schedule_of(config)  # refused before anything is made
    check_boards(config.metrics)
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
        run = TrainingRun(config, mesh, graph, model.config, tokenizer, output, time)
        parameters = to_export(run.run(parameters))  # the moments are not kept for it
    exported = dataclasses.replace(model.config, model_type="wedlm")
    trained = nnx.merge(graph, parameters)
    save_checkpoint(trained, exported, output / "hf", dtype="float32", tokenizer_from=folder)
    return output / "hf"


def to_export(state: TrainState) -> nnx.State:
    """The average of the parameters where the recipe has one, else the newest."""
    return averaged_parameters(state.optimizer, state.parameters)


class TrainingRun:
    """One attempt at a run: from its newest checkpoint to its last step.

    Args:
      config: the recipe.
      mesh: already set.
      graph, model: of the model.
      tokenizer: for the synthetic corpus.
      output: the run's folder.
      time: the clock of this attempt.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        graph: nnx.GraphDef,
        model: ModelConfig,
        tokenizer: Tokenizer,
        output: Path,
        time: RunTime,
    ):
        self._config, self._mesh, self._output, self._time = config, mesh, output, time
        pad = model.pad_token_id or 0
        self._phases = phases_of(config)
        for phase in self._phases:
            own = phase.config
            check_fits(mesh, model, rows=own.rows, row_length=own.row_length)
        self._data = [training_rows(phase.config, output, tokenizer, pad) for phase in self._phases]
        self._optimizer, objective = optimizer_of(config), objective_of(config, model)
        self._step = make_train_step(
            graph,
            self._optimizer,
            objective,
            schedule=schedule_of(config),
            guard=guard_of(config),
            norms=config.metrics.norms,
        )
        self._flops: dict[tuple[int, ...], float] = {
            phase.batch_shape: model_flops(phase.config, model) for phase in self._phases
        }
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
        config, done, time = self._config, int(state.step), self._time
        key = jax.random.key(config.seed)
        compiled = self._compile(state, key)
        batches = PhasedBatches(self._phases, self._data, batch_sharding(self._mesh), start=done)
        pending = self._pending(batches, done)
        log = self._open_log(done)
        time.begin(self._output, done)
        stop, watch = AgreedStop(), StallWatch(config.metrics.stall_factor)
        try:
            with stop, watch, self._profiler() as profiler:
                for step in range(done + 1, config.steps + 1):
                    profiler.before(step - 1, state.step)
                    watch.step()
                    with time.spent("input"):
                        rows = next(batches)
                    shape = rows.tokens.shape
                    state, metrics = compiled[shape](state, rows, key)
                    pending.add(step, metrics)
                    time.step(step, rows.tokens.size, self._flops[shape])
                    last, ends = step == config.steps, stop.after(step)
                    try:
                        if last or step % config.log_every == 0:
                            self._log(log, step, pending.record())
                        if saves := last or ends or step % config.checkpoint_every == 0:
                            pending.keep(step)
                    except TooManySkipped:
                        checkpoints.save(state)  # from there a restart goes on behind them
                        raise
                    if saves:
                        watch.pause()
                        with time.spent("checkpoint"):
                            checkpoints.save(state)
                    self._evaluate(step, state, watch)
                    if ends and not last:
                        raise RunStopped(step, stop.status)
                profiler.end(config.steps, state.step)
        finally:
            batches.close()
            if log is not None:
                log.close()
            time.close()
        return state

    def _pending(self, batches: PhasedBatches, done: int) -> PendingMetrics:
        return PendingMetrics(
            self._output,
            self._config.optimizer.max_skipped,
            batches.read_from,
            ar_weight=self._config.loss.ar_weight,
            done=done,
        )

    def _profiler(self) -> Profiler:
        metrics = self._config.metrics
        return Profiler(self._output, metrics.profile_from, metrics.profile_steps)

    def _compile(self, state: TrainState, key: jax.Array) -> dict[tuple[int, ...], Any]:
        """The step for every shape of a batch that is still to come, compiled before the first,
        and what it takes of the memory."""
        done, compiled = int(state.step), dict[tuple[int, ...], Any]()
        for phase in self._phases:
            shape = phase.batch_shape
            if phase.stop <= done or shape in compiled:
                continue
            with self._time.spent("compile"):
                rows = abstract_rows(phase.config, self._mesh)
                compiled[shape] = self._step.lower(state, rows, key).compile()
            budget = describe_budget(state, compiled[shape])
            say(f"compiled {self._time.seconds['compile']:.0f} s; {budget}")
        return compiled

    def _open_log(self, done: int) -> MetricsLog | None:
        if not is_first():
            return None
        config = self._config
        for name in (SKIPPED, EVALUATION):  # what is done again is told again
            cut_back(self._output / name, done)
        boards = open_boards(config, self._output, done)
        return MetricsLog(self._output, config.steps, done, config.objective, boards)

    def _log(self, log: MetricsLog | None, step: int, record: Record) -> None:
        devices = self._mesh.devices.flat
        peak = peak_flops(devices[0])
        speed = self._time.read(None if peak is None else peak * len(devices))
        if used := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
            record["memory_peak_bytes"] = used
        if log is not None:
            log.write(step, record | speed)

    def _evaluate(self, step: int, state: TrainState, watch: StallWatch) -> None:
        every = self._config.evaluation.every
        if self._evaluation is None or (step % every and step != self._config.steps):
            return
        watch.pause()
        with self._time.spent("evaluation"):
            record = self._evaluation.run(to_export(state))
        append_record(self._output, step, record)
        say(f"held out, step {step}: " + " ".join(f"{k} {v:.4g}" for k, v in record.items()))
