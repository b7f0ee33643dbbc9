"""A look at the model in mid-run: losses on held-out rows, and what its decoder makes of them.

Rows and masks are the same at every evaluation, so its numbers differ by the model alone.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.evaluation.decoding import At, OwnEngine, can_decode, decode_all
from train.evaluation.questions import AskedQuestions
from train.prediction_blocks import blocks_of_rows
from train.recipe.config import TrainConfig
from train.step import Objective, make_evaluation_step
from train.watch.records import Record, flatten
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.engine.config import DEFAULT_WINDOW
from wedlm_jax.engine.engine import Engine
from wedlm_jax.host.processes import jax_processes, sum_over_all
from wedlm_jax.host.signals import compiled
from wedlm_jax.model import Transformer
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import batch_sharding

MASKS = 2**31
"""Folded into the run's key for the masks; no step has this number."""


class Evaluation:
    """Judges a model by held-out rows, prompts and questions, with programs compiled for them.

    Args:
      config: the recipe.
      mesh: mesh of the run.
      graph, model: the model's graph, and its configuration.
      objective: objective of the run.
      rows: held-out packed rows, arrays ``[N, L]``; the last are left out where N is no
        multiple of the recipe's rows.
      questions: that the model is asked, if any.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        graph: nnx.GraphDef[Transformer],
        model: ModelConfig,
        objective: Objective,
        rows: dict[str, np.ndarray],
        questions: AskedQuestions | None = None,
    ):
        count = max(len(rows["tokens"]) // config.rows, 1) * config.rows
        sharding = batch_sharding(mesh)

        def place(x: np.ndarray) -> jax.Array:
            # Rows are repeated where there are fewer than a micro-batch.
            x = np.resize(x, (count, *x.shape[1:])).reshape(-1, config.rows, *x.shape[1:])
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        placed = blocks_of_rows(rows, config, mesh.shape["sequence"])
        self._rows = PackedRows(**{name: place(x) for name, x in placed.items()})
        self._key = jax.random.fold_in(jax.random.key(config.seed), MASKS)
        self._jitted = make_evaluation_step(graph, objective)
        self._step: jax.stages.Compiled | None = None
        section, masks = config.evaluation, objective.kind == "wedlm"
        self._prompts = prompts_of(rows, section.prompts if masks else 0, section.seed)
        longest, limit = max(map(len, self._prompts), default=0), model.max_position_embeddings
        tokens = min(section.max_tokens, limit - longest)
        self._params = SamplingParams(max_tokens=tokens, mode="paper")
        self._questions = questions
        most, longest = len(self._prompts), longest + tokens
        if questions is not None:
            most, longest = max(most, len(questions)), max(longest, questions.longest)
        self._engine: OwnEngine | None = None
        if most and can_decode(mesh, model.hidden_size):
            self._engine = OwnEngine(
                mesh,
                graph,
                dtype=config.loss.dtype,
                window=DEFAULT_WINDOW if masks else 0,
                prompts=-(-most // jax_processes().count),
                longest=longest,
                known_tokens=None if questions is None else questions.codec.token_ids,
            )

    def run(self, parameters: nnx.State, at: At = lambda text: None) -> Record:
        """Takes losses and perplexity, decodes the prompts (tokens per forward and p_cache), and
        has the questions answered.

        All processes of a run call this, under its mesh. Each decodes its share of the prompts
        and questions on its own devices.

        Args:
          at: told what goes on.
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
        if self._engine is None:
            return {}
        processes, answers = jax_processes(), np.zeros(0, np.int64)
        with self._engine.having(parameters, at) as engine:
            counts = self._decode_prompts(engine, processes.index, processes.count, at)
            if self._questions is not None:
                answers = self._questions.answer(engine, processes.index, processes.count, at)
        record: Record = {}
        if self._prompts:
            made, forwards, instances = sum_over_all(counts).tolist()
            record = {"tokens_per_forward": made / forwards, "p_cache": made / instances}
        if self._questions is not None:
            record |= self._questions.record(sum_over_all(answers))
        return record

    def _decode_prompts(self, engine: Engine, first: int, every: int, at: At) -> np.ndarray:
        """Counts tokens, forwards and token instances of every ``every``-th prompt."""
        counts = [
            (len(result.token_ids), result.num_forwards, result.num_token_instances)
            for result in decode_all(engine, self._prompts[first::every], self._params, at)
        ]
        return np.array(counts, np.int64).reshape(-1, 3).sum(axis=0)


def prompts_of(rows: dict[str, np.ndarray], count: int, seed: int = 0) -> list[list[int]]:
    """Returns prompts from samples of packed rows, drawn by the seed: what stands before the first
    trainable token, or the first half of a sample that is trainable from its start."""
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
