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
from train.distributed import mesh_of_processes, own_copy
from train.step import Objective, make_evaluation_step
from train.watch.records import Record, as_json, flatten
from wedlm_jax.config import ModelConfig
from wedlm_jax.corruption import PackedRows
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.engine import Engine
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import merged
from wedlm_jax.params import SamplingParams
from wedlm_jax.processes import is_first, jax_processes, say, sum_over_all
from wedlm_jax.sharding import batch_sharding

MASKS = 2**31
"""Folded into the run's key for the masks; no step has this number."""
WINDOW = 16
MOST_AT_ONCE = 16
"""Prompts that a process decodes together."""
EVALUATION = "evaluation.jsonl"


class Evaluation:
    """Held-out rows and prompts, and the compiled programs that judge a model by them.

    Args:
      config: the recipe.
      mesh: of the run.
      graph, model: of the model.
      objective: of the run.
      rows: held-out packed rows, arrays ``[N, L]``; the last are left out where N is no
        multiple of the recipe's rows.
    """

    def __init__(
        self,
        config: TrainConfig,
        mesh: Mesh,
        graph: nnx.GraphDef[Transformer],
        model: ModelConfig,
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
        self._processes = mesh_of_processes(mesh)
        decodes = objective.kind == "wedlm" and can_decode(
            self._processes.local_mesh, model.hidden_size
        )
        section = config.evaluation
        self._prompts = prompts_of(rows, section.prompts if decodes else 0, section.seed)
        self._engine: Engine | None = None

    def run(self, parameters: nnx.State) -> Record:
        """Losses, perplexity, and decoding of the prompts: tokens per forward and p_cache.

        All processes of a run call this, under its mesh. Each decodes its share of the prompts
        on its own devices (`train.distributed`)."""
        record = flatten(jax.device_get(self._step(parameters, self._rows, self._key)))
        record["ar_perplexity"] = math.exp(min(record["ar_loss"], 100.0))
        return record | self._decode(parameters)

    def _decode(self, parameters: nnx.State) -> Record:
        if not self._prompts:
            return {}
        dtype = jnp.dtype(self._config.loss.dtype)
        graph, parameters = nnx.split(merged(nnx.merge(self._graph, parameters)))
        copy = own_copy(self._processes, jax.tree.map(lambda x: x.astype(dtype), parameters))
        with jax.set_mesh(self._processes.local_mesh):
            counts = self._decode_own(nnx.merge(graph, copy))
        if self._engine is not None:
            self._engine.release()  # training needs the room
        made, forwards, instances = sum_over_all(counts).tolist()
        return {"tokens_per_forward": made / forwards, "p_cache": made / instances}

    def _decode_own(self, model: Transformer) -> np.ndarray:
        """Tokens, forwards and token instances of this process's share of the prompts."""
        processes = jax_processes()
        prompts = self._prompts[processes.index :: processes.count]
        if not prompts:
            return np.zeros(3, np.int64)
        limit, longest = model.config.max_position_embeddings, max(map(len, self._prompts))
        tokens = min(self._config.evaluation.max_tokens, limit - longest)
        if self._engine is None:
            # No larger than needed: the rest of the memory is the optimizer's.
            self._engine = Engine(
                model,
                window_size=WINDOW,
                max_batch_size=min(len(prompts), MOST_AT_ONCE),
                max_model_len=longest + tokens,
                mesh=self._processes.local_mesh,
            )
        else:
            self._engine.update(model)
        params = SamplingParams(max_tokens=tokens, mode="paper")
        requests = [Request(i, prompt, params) for i, prompt in enumerate(prompts)]
        counts = [
            (len(result.token_ids), result.num_forwards, result.num_token_instances)
            for result in self._engine.decode(requests)
        ]
        return np.sum(counts, axis=0)


def can_decode(own: Mesh, hidden_size: int) -> bool:
    """Whether a process can cut a copy of the parameters over its own devices; says so where
    it cannot."""
    devices = own.shape["fsdp"]
    if hidden_size % devices:
        say(
            f"evaluation: takes losses only; hidden_size {hidden_size} is not divisible by "
            f"the {devices} devices of a process"
        )
        return False
    return True


def prompts_of(rows: dict[str, np.ndarray], count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings of samples of packed rows, drawn by the seed: what stands before the first
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


def append_record(output: Path, step: int, record: Record) -> None:
    """One line more in `EVALUATION`, by the first process."""
    if is_first():
        with (output / EVALUATION).open("a", encoding="utf-8") as file:
            file.write(as_json(step, record))
