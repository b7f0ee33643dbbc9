"""Evaluates the model during a run: losses on held-out rows, decoding of prompts from these rows,
and answers to questions.

Rows, masks, prompts and questions are the same at every evaluation, so only the model changes the
numbers. Each process decodes its share with a copy of the parameters, on its own devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from train.automatic import blocks_of_rows
from train.program import TrainProgram
from train.recipe.config import EvaluationSection, TrainConfig
from train.step import make_evaluation_step
from train.watch.records import Record, flatten
from wedlm_jax.checkpoint.hf import copy_tokenizer
from wedlm_jax.completion import Completion
from wedlm_jax.corruption import PackedRows
from wedlm_jax.engine.config import DEFAULT_WINDOW, EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError, errors_at
from wedlm_jax.generation import complete
from wedlm_jax.host.processes import jax_processes, say, sum_over_all
from wedlm_jax.host.signals import compiled
from wedlm_jax.host.storage import folder_of_this_machine, is_remote
from wedlm_jax.model.lora import merged
from wedlm_jax.params import SamplingParams
from wedlm_jax.records.questions import Question, Tally, read_questions, tally
from wedlm_jax.sharding import batch_sharding, tree_shardings
from wedlm_jax.text import TextCodec

MASKS = 2**31
"""The number folded into the run's key to draw the masks; no step has it."""

At = Callable[[str], None]
"""Called with what an evaluation is doing; an exception that it raises ends the evaluation."""

MOST_AT_ONCE = 16
"""The maximum number of prompts that a process decodes together."""
BURST = 16
"""Forwards between two checks of whether the run should stop."""


class Evaluation:
    """Evaluates a model on held-out rows, prompts and questions, with programs compiled for them.

    Args:
      program: the run's program.
      rows: held-out packed rows, arrays ``[N, L]``; the last ones are left out if N is not a
        multiple of the recipe's ``rows``.
      questions: questions to ask the model, if any.
    """

    def __init__(
        self,
        program: TrainProgram,
        rows: dict[str, np.ndarray],
        questions: AskedQuestions | None = None,
    ):
        config, model, mesh = program.config, program.model, program.mesh
        count = max(len(rows["tokens"]) // config.rows, 1) * config.rows
        sharding = batch_sharding(mesh)

        def place(x: np.ndarray) -> jax.Array:
            # Rows are repeated if there are fewer than a micro-batch has.
            x = np.resize(x, (count, *x.shape[1:])).reshape(-1, config.rows, *x.shape[1:])
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        placed = blocks_of_rows(rows, config, mesh.shape["sequence"])
        self._rows = PackedRows(**{name: place(x) for name, x in placed.items()})
        self._key = jax.random.fold_in(jax.random.key(config.seed), MASKS)
        self._jitted = make_evaluation_step(program.graph, program.objective)
        self._step: jax.stages.Compiled | None = None
        section, masks = config.evaluation, config.objective == "wedlm"
        self._prompts = prompts_of(rows, section.prompts if masks else 0, section.seed)
        longest, limit = max(map(len, self._prompts), default=0), model.max_position_embeddings
        tokens = min(section.max_tokens, limit - longest)
        self._params = SamplingParams(max_tokens=tokens, mode="paper")
        self._questions = questions
        most, longest = len(self._prompts), longest + tokens
        if questions is not None:
            most, longest = max(most, len(questions)), max(longest, questions.longest)
        self._graph, self._dtype = program.graph, config.loss.dtype
        self._processes = mesh_of_processes(mesh)
        self._engine: Engine | None = None
        self._engine_config: EngineConfig | None = None
        if most and can_decode(mesh, model.hidden_size):
            # No larger than needed: the optimizer's state takes the rest of the memory.
            self._engine_config = EngineConfig(
                window_size=DEFAULT_WINDOW if masks else 0,
                lookup=0,
                max_batch_size=min(-(-most // jax_processes().count), MOST_AT_ONCE),
                max_model_len=longest,
            )

    def run(self, parameters: nnx.State, at: At = lambda text: None) -> Record:
        """Computes losses and perplexity, decodes the prompts (tokens per forward and p_cache), and
        answers the questions; ``at`` is called with what it is doing.

        All processes of a run call this, under its mesh. Each decodes its share of the prompts
        and questions on its own devices.
        """
        arguments = parameters, self._rows, self._key
        if self._step is None:
            at("compiling the losses on held-out rows")
            self._step = compiled(self._jitted.lower(*arguments).compile)
        at("losses on held-out rows")
        record = flatten(jax.device_get(self._step(*arguments)))
        if "ar_loss" in record:
            record["ar_perplexity"] = math.exp(min(record["ar_loss"], 100.0))
        return record | self._decode(parameters, at)

    def _decode(self, parameters: nnx.State, at: At) -> Record:
        if self._engine_config is None:
            return {}
        processes, answers = jax_processes(), np.zeros(0, np.int64)
        own = slice(processes.index, None, processes.count)
        with self._engine_with(parameters, self._engine_config, at) as engine:
            decoded = decode_all(engine, self._prompts[own], self._params, at, "prompts")
            if self._questions is not None:
                answers = self._questions.answer(engine, own, at)
        record: Record = {}
        if self._prompts:
            counts = [(len(x.token_ids), x.num_forwards, x.num_token_instances) for x in decoded]
            own_sums = np.array(counts, np.int64).reshape(-1, 3).sum(axis=0)
            made, forwards, instances = sum_over_all(own_sums).tolist()
            record = {"tokens_per_forward": made / forwards, "p_cache": made / instances}
        if self._questions is not None:
            record |= self._questions.record(sum_over_all(answers))
        return record

    @contextlib.contextmanager
    def _engine_with(self, parameters: nnx.State, config: EngineConfig, at: At) -> Iterator[Engine]:
        """Gives the engine these parameters within the block. All processes of a run call this
        together (`own_copy`)."""

        @contextlib.contextmanager
        def busy(what: str) -> Iterator[None]:
            at(what)
            yield
            at("decoding")

        at("copying the parameters to decode")
        graph, whole = nnx.split(merged(nnx.merge(self._graph, parameters)))
        cast = jax.tree.map(lambda x: x.astype(self._dtype), whole)
        model = nnx.merge(graph, own_copy(self._processes, cast))
        del whole, cast
        mesh = self._processes.local_mesh
        with jax.set_mesh(mesh):
            if self._engine is None:
                known = None if self._questions is None else self._questions.codec.token_ids
                self._engine = Engine(model, config, mesh=mesh, known_tokens=known)
            else:
                self._engine.update(model)
            del model
            self._engine.device.programs.while_busy = busy
            try:
                yield self._engine
            finally:
                self._engine.release()  # training needs the memory


def prompts_of(rows: dict[str, np.ndarray], count: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts from samples of packed rows, drawn with the seed: the tokens before the first
    trainable one, or the first half of a sample that is trainable from its start."""
    prompts: list[list[int]] = []
    for tokens, segments, trainable in zip(
        rows["tokens"], rows["segment_ids"], rows["trainable"], strict=True
    ):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            place = np.flatnonzero(segments == segment)
            first = int(np.argmax(trainable[place])) or len(place) // 2
            if first:
                prompts.append(tokens[place[:first]].tolist())
    drawn = np.random.default_rng(seed).permutation(len(prompts))[:count]
    return [prompts[i] for i in drawn]


def decode_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    at: At,
    what: str,
) -> list[Completion]:
    """Decodes prompts, possibly none; ``at`` is called with how many of ``what`` are done."""

    def report(finished: int) -> None:
        at(f"{finished} of {len(prompts)} {what} decoded")

    requests = [Request(number, prompt, params) for number, prompt in enumerate(prompts)]
    return engine.decode(requests, report, BURST) if requests else []


def can_decode(mesh: Mesh, hidden_size: int) -> bool:
    """Returns whether each process of a run can shard a copy of the parameters over its own
    devices; prints a message if it cannot."""
    devices = mesh_of_processes(mesh).local_mesh.shape["fsdp"]
    if hidden_size % devices:
        say(
            f"evaluation: computes losses only, because hidden_size {hidden_size} is not divisible "
            f"by the {devices} devices of a process"
        )
        return False
    return True


def mesh_of_processes(mesh: Mesh) -> Mesh:
    """Returns a mesh of the same devices with ``data`` over processes and ``fsdp`` over the devices
    of each; its ``local_mesh`` has the devices of the current process."""
    devices = sorted(mesh.devices.flat, key=lambda device: device.process_index)
    processes = len({device.process_index for device in devices})
    shape = (processes, len(devices) // processes, *[1] * (len(mesh.axis_names) - 2))
    return Mesh(np.array(devices).reshape(shape), mesh.axis_names, axis_types=mesh.axis_types)


def own_copy(processes: Mesh, tree: Any) -> Any:
    """Copies all parameters, with any sharding, to each process's own devices, which share the
    hidden axis (`mesh_of_processes`). All processes call this together; each holds no more than its
    copy.

    Joint computations must run in lockstep, but a decode loop ends when its sequences do. So the
    processes of a run decode separately, each its own prompts on its own devices.
    """

    def as_own(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        pieces = [shard.data for shard in x.addressable_shards]
        return jax.make_array_from_single_device_arrays(x.shape, sharding, pieces)

    copies = jax.device_put(tree, tree_shardings(processes, tree))
    return jax.tree.map(as_own, copies, tree_shardings(processes.local_mesh, tree))


def drawn_questions(section: EvaluationSection) -> list[Question]:
    """Reads a recipe's questions and draws those to ask with its seed; returns them regime by
    regime, in the order of the file. Returns none if the recipe names no file.

    Raises:
      InputError: a question is malformed; the message names the file, the line and the field.
    """
    if section.questions is None or not section.every:
        return []
    path = folder_of_this_machine(section.questions, "evaluation.questions")
    with errors_at("evaluation.questions"):
        regimes = read_questions(path)
    found = [question for some in regimes.values() for question in some]
    drawn = np.random.default_rng(section.seed).permutation(len(found))[: section.most_questions]
    return [found[i] for i in sorted(drawn)]


class AskedQuestions:
    """Asks questions, given as token ids, and scores the answers.

    Args:
      questions: at least one question.
      room: maximum number of tokens of a prompt and its answer.

    Attributes:
      longest: the most tokens that a question and its answer may have; at most ``room``.

    Raises:
      InputError: a prompt is empty, too long, or refused by the tokenizer; the message names its
        line.
    """

    def __init__(
        self, questions: Sequence[Question], codec: TextCodec, params: SamplingParams, room: int
    ):
        self._questions, self.codec, self._params = questions, codec, params
        self._regimes = list(dict.fromkeys(question.regime for question in questions))
        self._prompts = [question.encode(codec) for question in questions]
        for question, prompt in zip(questions, self._prompts, strict=True):
            with question.named():
                if not prompt:
                    raise InputError("prompt: expected at least one token")
                if len(prompt) + params.max_tokens > room:
                    raise InputError(
                        f"a prompt of {len(prompt)} tokens and evaluation.answer_tokens="
                        f"{params.max_tokens} do not fit into the model's context of {room}"
                    )
        self.longest = max(map(len, self._prompts)) + params.max_tokens

    def __len__(self) -> int:
        return len(self._questions)

    def answer(self, engine: Engine, own: slice, at: At) -> np.ndarray:
        """Answers this process's questions; ``at`` is called with how many are done.

        Returns:
          int64 ``[regimes, fields of Tally]``; the sum over all processes covers all questions.
        """
        questions = self._questions[own]
        results = decode_all(engine, self._prompts[own], self._params, at, "questions")
        answers = [complete(self.codec, result, self._params) for result in results]
        counts = []
        for regime in self._regimes:
            asked = [i for i, question in enumerate(questions) if question.regime == regime]
            counted = tally([questions[i] for i in asked], [answers[i] for i in asked])
            counts.append(dataclasses.astuple(counted))
        return np.array(counts, np.int64)

    def record(self, counts: np.ndarray) -> Record:
        """Returns the scores, given the sum of `answer` over all processes."""
        by_regime = [Tally(*row) for row in counts.tolist()]
        whole = Tally(*counts.sum(axis=0).tolist())
        record: Record = {}
        if whole.accuracy is not None:
            record["question_accuracy"] = whole.accuracy
        if len(by_regime) > 1:
            for regime, own in zip(self._regimes, by_regime, strict=True):
                if own.accuracy is not None:
                    record[f"question_accuracy/{regime}"] = own.accuracy
        return record | {
            "question_tokens_per_forward": whole.tokens_per_forward,
            "questions": whole.questions,
            "questions_cut": whole.cut,
        }


def asked_questions(
    config: TrainConfig, questions: Sequence[Question], folder: Path, context: int
) -> AskedQuestions | None:
    """Prepares `drawn_questions` for a model, given the folder of its tokenizer and its context
    length; returns None if there are none. Raises as `AskedQuestions`."""
    if not questions:
        return None
    section = config.evaluation
    mode = section.mode if config.objective == "wedlm" else "ar"
    params = SamplingParams(max_tokens=section.answer_tokens, mode=mode)
    with tempfile.TemporaryDirectory() as copy:
        if is_remote(folder):
            copy_tokenizer(folder, Path(copy))
            folder = Path(copy)
        codec = TextCodec.load(folder)
    assert codec is not None, "the run has loaded its tokenizer from there"
    return AskedQuestions(questions, codec, params, context)
