"""The training loop: resume, step, log, evaluate, save, export."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from train.agreement import agree
from train.automatic import needed_by_sources, settled_here, with_prediction_blocks
from train.checkpoint import Checkpoints
from train.data.batches import RowSets, TrainBatches
from train.data.sources import Epochs, open_sources
from train.data.tokenizer import load_tokenizer
from train.distributed import AgreedStop
from train.evaluation import AskedQuestions, Evaluation, asked_questions, drawn_questions
from train.optimizer import averaged_parameters, schedule_of
from train.program import TrainProgram, abstract_rows, make_program
from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of, source_names
from train.recipe.skipped_batches import SkippedBatches
from train.resume import Origin, begin_or_resume, check_origin, origin_of, write_origin
from train.run_files import RunFiles, open_output
from train.start import (
    check_paths,
    check_start,
    held_out_rows,
    recipe_model,
    starting_state,
    tokenizer_folder,
)
from train.step import TrainState, forgiven, with_frozen
from train.step_cost import describe_budget, model_flops, peak_flops
from train.watch.diagnosis import Profiler, StallWatch
from train.watch.log import MetricsLog, NoLog, check_boards, evaluated_steps, open_boards
from train.watch.records import SKIPPED, PendingMetrics, Record, TooManySkipped, cut_back
from train.watch.run_time import RunTime
from wedlm_jax.attention import check_runs_on
from wedlm_jax.checkpoint import RUN_BASE, RUN_DRAFTER, RUN_STATES
from wedlm_jax.checkpoint.adapters import save_drafter
from wedlm_jax.checkpoint.hf import HFCheckpoint
from wedlm_jax.checkpoint.model import save_checkpoint
from wedlm_jax.checkpoint.orbax import describe_run, is_described
from wedlm_jax.errors import CompilingInterrupted, StorageFailure
from wedlm_jax.host.processes import answer_of_first, is_first, jax_processes, say
from wedlm_jax.host.progress import saying_once
from wedlm_jax.host.storage import as_path, is_remote
from wedlm_jax.sharding import batch_sharding, make_mesh


class RunStopped(Exception):
    """The run has ended on request after ``step`` steps, with its state saved; ``status`` is the
    process's exit status."""

    def __init__(self, step: int, status: int):
        super().__init__(f"stopped after step {step}")
        self.step, self.status = step, status


def train(config: TrainConfig, *, allow_changed: bool = False) -> Path:
    """Runs (or resumes) the training that ``config`` describes. All processes of a run call this.

    Args:
      config: the recipe.
      allow_changed: resume although the recipe has changed since the run began.

    Returns:
      the folder of the exported Hugging Face checkpoint, ``<output>/hf``, or of the drafter,
      ``<output>/drafter``.

    Raises:
      InputError: the recipe or its files are not valid, or differ between hosts; or too many
        consecutive steps were skipped, in which case the state is saved.
      RunStopped: SIGTERM or Ctrl-C came; the state is saved, and the same call continues from it.
      StorageFailure: in all processes, if one of them could not write or read a state; the same
        call continues from the newest whole one.
    """
    time = RunTime()
    schedule_of(config)  # checked before anything is created
    check_boards(config.metrics)
    check_paths(config)
    begun = agree(config, allow_changed=allow_changed)
    mesh = make_mesh(dataclasses.asdict(config.mesh))
    check_runs_on(config.loss.attention, mesh.devices.flat[0].platform)
    questions = drawn_questions(config.evaluation)
    local = not is_remote(config.output)
    is_new = local and is_first() and not as_path(config.output).exists()
    output = open_output(config.output)
    files = RunFiles(output)
    checkpoints = Checkpoints(
        output / RUN_STATES,
        config.keep_checkpoints,
        config.keep_every,
        config.checkpoint_timeout,
        begun,
    )
    try:
        origin = None if begun else origin_of(config)
        before = output if begun else origin.run if origin else None
        folder = tokenizer_folder(config, before=before)
        tokenizer = load_tokenizer(folder)
        check_start(config, before=before)
        model = recipe_model(config, folder, before)
        pad = model.pad_token_id or 0
        data = open_sources(config, tokenizer, pad)
        held = held_out_rows(config, tokenizer, pad) if config.evaluation.every else None
        filled = with_prediction_blocks(config, needed_by_sources, mesh.shape["sequence"])
        program = make_program(filled, model, mesh)
        if origin is not None:
            check_origin(origin, program)
        asked = asked_questions(config, questions, folder, model.max_position_embeddings)
        begin_or_resume(config, output, files.folder, begun, origin, allow_changed=allow_changed)
        if origin is not None:
            write_origin(origin, output, files.folder)
        # Process 0 decides whether all processes write the description, which they do together.
        if not answer_of_first(bool(begun) and is_described(output, model)):
            describe_run(output, model, folder, program.lora)
        with jax.set_mesh(mesh):
            with time.spent("compile"):
                program = settled_here(program)
            run = TrainingRun(program, data, held, files, time, asked)
            parameters = to_export(run.run(checkpoints, origin))  # drops the moments
    except StorageFailure:
        files.abandon()  # the storage may refuse them, too
        raise
    finally:
        checkpoints.close()
        files.close()
        if is_new:
            with contextlib.suppress(OSError):
                output.rmdir()  # empty where the recipe was refused
    if program.lora is not None and program.lora.rows == "masked":
        drafter = output / RUN_DRAFTER
        with saying_once("exporting the drafter"):
            adapters = nnx.filter_state(parameters, nnx.LoRAParam)
            save_drafter(
                adapters,
                program.lora,
                drafter,
                base=HFCheckpoint(output / RUN_BASE),
                dtype=config.export_dtype,
            )
        return drafter
    exported = dataclasses.replace(model, model_type="wedlm")
    trained = nnx.merge(program.graph, parameters)
    with saying_once("exporting the model"):
        save_checkpoint(
            trained, exported, output / "hf", dtype=config.export_dtype, tokenizer_from=folder
        )
    return output / "hf"


def to_export(state: TrainState) -> nnx.State:
    """Returns all parameters of the model; the trained ones are averaged if the recipe says so."""
    return with_frozen(averaged_parameters(state.optimizer, state.parameters), state.frozen)


class TrainingRun:
    """One attempt at a run: from its newest checkpoint to its last step.

    Args:
      program: the recipe's program; its mesh must be the current one.
      data: the rows of each phase.
      held: rows to evaluate on, arrays ``[N, L]``; None if the run does not evaluate.
      questions: questions to ask at every evaluation, if any.
    """

    def __init__(
        self,
        program: TrainProgram,
        data: Sequence[RowSets],
        held: dict[str, np.ndarray] | None,
        files: RunFiles,
        time: RunTime,
        questions: AskedQuestions | None,
    ):
        config, model = program.config, program.model
        self._program, self._config, self._mesh = program, config, program.mesh
        self._files, self._output, self._time = files, files.folder, time
        self._phases, self._data = phases_of(config), data
        self._sources = source_names(config)
        self._skipped = SkippedBatches.of(config.data.skip)
        sizes: dict[str, int] = {}
        for phase, sets in zip(self._phases, data, strict=True):
            for name, (rows, _) in zip(phase.config.data.sources, sets, strict=True):
                sizes[name] = len(rows)
        self._epochs = Epochs(self._phases, sizes)
        self._flops: dict[tuple[int, ...], float] = {
            phase.batch_shape: model_flops(phase.config, model) for phase in self._phases
        }
        self._evaluation = None if held is None else Evaluation(program, held, questions)

    def run(self, checkpoints: Checkpoints, origin: Origin | None) -> TrainState:
        """Trains from the newest checkpoint, or from where the recipe starts, to the last step.

        Args:
          origin: another run's state, from which a run without states begins.
        """
        done = origin.step if origin else min(checkpoints.steps(), default=0)
        compiled = self._compile(done)
        with saying_once("preparing the state"):
            state = starting_state(self._program, checkpoints, origin)
        if int(state.step) < self._config.steps:
            state = self._train(compiled, state, checkpoints)
        elif self._is_due(int(state.step)):
            self._evaluate_finished(state)
        return state

    def _train(
        self, compiled: dict[tuple[int, ...], Any], state: TrainState, checkpoints: Checkpoints
    ) -> TrainState:
        config, done, time = self._config, int(state.step), self._time
        several = jax_processes().count > 1
        key = self._program.mask_key()
        batches = TrainBatches(self._phases, self._data, batch_sharding(self._mesh), start=done)
        pending = PendingMetrics(
            self._output,
            config.optimizer.max_skipped,
            batches.read_from,
            self._skipped,
            ar_weight=config.loss.ar_weight,
            sources=self._sources,
            done=done,
        )
        log = self._open_log(done)
        for line in (*self._epochs.lines(done), checkpoints.kept(config.checkpoint_every)):
            say(line)
        time.begin(self._output, done)
        metrics = config.metrics
        stop, watch = AgreedStop(), StallWatch(metrics.stall_factor)
        profiler = Profiler(self._output, metrics.profile_from, metrics.profile_steps)
        try:
            with stop, watch, profiler:
                self._evaluate_first(log, state, stop)
                every = config.log_every
                log.expect(min(done + every - done % every, config.steps))
                for step in range(done + 1, config.steps + 1):
                    profiler.before(step - 1, state.step)
                    watch.step()
                    with time.spent("input"):
                        rows = next(batches)
                    shape = next(phase.batch_shape for phase in self._phases if step <= phase.stop)
                    state, measured = compiled[shape](state, rows, key)
                    pending.add(step, measured)
                    log.step(step - 1)  # the newest step is still running
                    time.step(step, rows.tokens.size, self._flops[shape])
                    last, ends = step == config.steps, stop.after(step)
                    try:
                        saves = last or ends or step % config.checkpoint_every == 0
                        # If evaluation fails in one process, they can no longer save together.
                        saves = saves or (several and self._is_due(step))
                        if last or step % every == 0:
                            self._log(log, step, pending.record())
                            saves = saves or checkpoints.failed()
                        if saves:
                            pending.keep(step)
                    except TooManySkipped:
                        # A restart from this state continues after them and does not count them.
                        self._save(checkpoints, forgiven(state), log, whole=True)
                        raise
                    if saves:
                        watch.pause()
                        with time.spent("checkpoint"):
                            self._save(checkpoints, state, log, whole=last or ends)
                    if ends and not last:
                        raise RunStopped(step, stop.status)
                    # After the state is saved, which does not depend on the evaluation; a resumed
                    # run makes an evaluation that is missing in the log.
                    if self._is_due(step):
                        watch.pause()
                        try:
                            self._log_evaluation(log, step, self._evaluate(state, log, stop))
                        except (Exception, CompilingInterrupted):
                            if not saves:
                                pending.keep(step)
                                self._save(checkpoints, state, log, whole=True)
                            raise
                profiler.end(config.steps, state.step)
        finally:
            batches.close()
            log.close()
            time.close()
        return state

    def _save(
        self, checkpoints: Checkpoints, state: TrainState, log: NoLog, *, whole: bool
    ) -> None:
        self._files.publish()  # so that the logs up to a state exist when the state does

        def text(seconds: float) -> str:
            return f"writing the state, {seconds:.0f} s so far"

        with log.saying(text) if whole else contextlib.nullcontext():
            checkpoints.save(state, whole=whole)

    def _compile(self, done: int) -> dict[tuple[int, ...], Any]:
        """Compiles the step for every batch shape after step ``done``, before weights are read, and
        prints its use of memory."""
        compiled = dict[tuple[int, ...], Any]()
        for phase in self._phases:
            shape = phase.batch_shape
            if phase.stop <= done or shape in compiled:
                continue
            before = self._time.seconds["compile"]
            with self._time.spent("compile"), saying_once("compiling the step"):
                rows = abstract_rows(phase.config, self._mesh, len(self._sources))
                compiled[shape] = self._program.compile(rows)
            budget = describe_budget(self._program.state, compiled[shape])
            say(f"compiled {self._time.seconds['compile'] - before:.0f} s; {budget}")
        return compiled

    def _open_log(self, done: int) -> NoLog:
        if not is_first():
            return NoLog()
        config = self._config
        cut_back(self._output / SKIPPED, done)  # repeated steps are reported again
        boards = open_boards(config, self._output, done)
        return MetricsLog(self._output, config.steps, done, config.objective, boards)

    def _log(self, log: NoLog, step: int, record: Record) -> None:
        devices = self._mesh.devices.flat
        peak = peak_flops(devices[0])
        speed = self._time.read(None if peak is None else peak * len(devices))
        if used := (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use"):
            record["memory_peak_bytes"] = used
        record |= self._epochs.record(step)
        if self._skipped.passed(step):
            record["batch"] = self._skipped.batch(step)
        log.write(step, record | speed)

    def _is_due(self, step: int) -> bool:
        """Returns whether the run evaluates after this many steps: before the first step, at each
        multiple of ``evaluation.every`` and after the last."""
        every = self._config.evaluation.every
        return bool(every) and (step % every == 0 or step == self._config.steps)

    def _evaluate(self, state: TrainState, log: NoLog, stop: AgreedStop | None = None) -> Record:
        """Evaluates and shows progress; raises `RunStopped` if asked to stop meanwhile."""
        assert self._evaluation is not None
        now, step = "", int(state.step)

        def at(text: str) -> None:
            nonlocal now
            now = text
            if stop is not None and stop.now:
                raise RunStopped(step, stop.status)

        saying = log.saying(lambda s: f"evaluating: {now}, {s:.0f} s so far")
        with self._time.spent("evaluation"), saying:
            return self._evaluation.run(to_export(state), at)

    def _evaluate_first(self, log: NoLog, state: TrainState, stop: AgreedStop) -> None:
        """Evaluates before the first step of an attempt, so that failures to compile, or a lack of
        memory, are found before there are steps to lose. The result is logged if the run evaluates
        at this step and has not done so yet."""
        if self._evaluation is None:
            return
        step = int(state.step)
        say(f"step {step}: evaluating on held-out rows before the first step, which compiles")
        record = self._evaluate(state, log, stop)
        if self._is_due(step) and not self._is_evaluated(step):
            self._log_evaluation(log, step, record)

    def _evaluate_finished(self, state: TrainState) -> None:
        """Makes the last evaluation of a run that was stopped during it."""
        step = int(state.step)
        if not self._is_evaluated(step):
            with contextlib.closing(self._open_log(step)) as log:
                self._log_evaluation(log, step, self._evaluate(state, log))

    def _is_evaluated(self, step: int) -> bool:
        """Returns whether process 0 has an evaluation of a step in the log."""
        return answer_of_first(is_first() and step in evaluated_steps(self._output))

    def _log_evaluation(self, log: NoLog, step: int, record: Record) -> None:
        log.evaluated(step, record)
        say(f"held out, step {step}: " + " ".join(f"{k} {v:.4g}" for k, v in record.items()))
