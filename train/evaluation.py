"""A look at the model in mid-run: losses on held-out rows, and what its decoder makes of them.

Rows and masks are the same at every evaluation, so its numbers differ by the model alone.
"""

from __future__ import annotations

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from train.config import TrainConfig
from train.metrics import Record, as_json, flatten
from train.step import Objective, make_evaluation_step
from wedlm_jax.corruption import PackedRows
from wedlm_jax.decoding import forward_shapes
from wedlm_jax.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.processes import is_first, jax_processes, say
from wedlm_jax.sampling import SamplingParams
from wedlm_jax.sharding import batch_sharding

MASKS = 2**31
"""Folded into the run's key for the masks; no step has this number."""
WINDOW = 16
EVALUATION = "evaluation.jsonl"


class Evaluation:
    """Held-out rows and prompts, and the compiled programs that judge a model by them.

    Args:
      config: the recipe.
      mesh: of the run.
      graph: of the model.
      objective: of the run.
      rows: held-out packed rows, arrays ``[N, L]``; the last are left out where N is no
        multiple of the recipe's rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        graph: nnx.GraphDef[Transformer],
        objective: Objective,
        rows: dict[str, np.ndarray],
    ):
        self._config, self._graph = config, graph
        count = max(len(rows["tokens"]) // config.rows, 1) * config.rows
        sharding = batch_sharding(mesh)

        def place(x: np.ndarray) -> jax.Array:
            # Rows are repeated where there are fewer than a micro-batch.
            x = np.resize(x, (count, *x.shape[1:])).reshape(-1, config.rows, *x.shape[1:])
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])

        self._rows = PackedRows(**{name: place(x) for name, x in rows.items()})
        self._key = jax.random.fold_in(jax.random.key(config.seed), MASKS)
        self._step = make_evaluation_step(graph, objective)
        decodes = objective.kind == "wedlm" and can_decode(mesh)
        self._prompts = prompts_of(rows, config.evaluation.prompts if decodes else 0)
        self._engine: Engine | None = None

    def run(self, parameters: nnx.State) -> Record:
        """Losses, perplexity, and decoding of the prompts: tokens per forward and p_cache.

        All processes of a run call this, under its mesh. Parameters stay cut as they are, and
        each device decodes its share of the prompts; several processes decode none."""
        record = flatten(jax.device_get(self._step(parameters, self._rows, self._key)))
        record["ar_perplexity"] = math.exp(min(record["ar_loss"], 100.0))
        return record | self._decode(parameters)

    def _decode(self, parameters: nnx.State) -> Record:
        if not self._prompts:
            return {}
        dtype = jnp.dtype(self._config.loss.dtype)
        model = nnx.merge(self._graph, jax.tree.map(lambda x: x.astype(dtype), parameters))
        if self._engine is None:
            self._engine = Engine(model, window_size=WINDOW)
        else:
            self._engine.update(model)
        limit = self._engine.max_model_len
        tokens = min(self._config.evaluation.max_tokens, limit - max(map(len, self._prompts)))
        params = SamplingParams(max_tokens=tokens)
        batch = self._engine.start(self._prompts, [params] * len(self._prompts))
        batch.advance()
        results = batch.results()
        made = sum(len(r.token_ids) for r in results)
        return {
            "tokens_per_forward": made / sum(r.num_forwards for r in results),
            "p_cache": made / sum(r.num_token_instances for r in results),
        }


def can_decode(mesh: Mesh) -> bool:
    """Whether prompts are decoded on this mesh; says why where they are not.

    One process decodes on any number of devices. Several do not: the decode loop's collectives
    came out of step when two processes were tried, on CPUs.
    """
    pieces, processes = mesh.shape["sequence"], jax_processes().count
    if processes > 1:
        say(f"evaluation: takes losses only; {processes} processes decode no prompts")
        return False
    if any(shape.slots % pieces for shape in forward_shapes((WINDOW,))):
        say(f"evaluation: takes losses only; mesh.sequence {pieces} does not cut a window evenly")
        return False
    return True


def prompts_of(rows: dict[str, np.ndarray], count: int) -> list[list[int]]:
    """Beginnings of the first samples of packed rows: what stands before the first trainable
    token, or the first half of a sample that is trainable from its start."""
    prompts: list[list[int]] = []
    for tokens, segments, trainable in zip(
        rows["tokens"], rows["segment_ids"], rows["trainable"], strict=True
    ):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            place = np.flatnonzero(segments == segment)
            if len(prompts) == count:
                return prompts
            first = int(np.argmax(trainable[place])) or len(place) // 2
            if first:
                prompts.append(tokens[place[:first]].tolist())
    return prompts


def append_record(output: Path, step: int, record: Record) -> None:
    """One line more in `EVALUATION`, by the first process."""
    if is_first():
        with (output / EVALUATION).open("a", encoding="utf-8") as file:
            file.write(as_json(step, record))
