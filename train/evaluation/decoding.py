"""Decoding in mid-run: each process with a copy of the parameters, on its own devices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence

import jax
from flax import nnx
from jax.sharding import Mesh

from train.distributed import mesh_of_processes, own_copy
from wedlm_jax.completion import Completion
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.interface import Request
from wedlm_jax.host.processes import say
from wedlm_jax.model import Transformer
from wedlm_jax.model.lora import merged
from wedlm_jax.params import SamplingParams

At = Callable[[str], None]
"""Told what an evaluation does now; what it raises ends the evaluation."""

MOST_AT_ONCE = 16
"""Prompts that a process decodes together."""
BURST = 16
"""Forwards between two looks at whether the run shall stop."""


class OwnEngine:
    """Lends the engine of a process the run's parameters while it decodes, and nothing between.

    Args:
      mesh: mesh of the run; see `can_decode`.
      graph: graph definition of the model.
      dtype: dtype of its parameters in decoding.
      window: W; 0 decodes autoregressively.
      prompts: the most that this process decodes together.
      longest: the most tokens of a prompt and its completion.
      known_tokens: the ids that may be chosen; None for all but the mask token's.
    """

    def __init__(
        self,
        mesh: Mesh,
        graph: nnx.GraphDef[Transformer],
        *,
        dtype: str,
        window: int,
        prompts: int,
        longest: int,
        known_tokens: Collection[int] | None = None,
    ):
        self._graph, self._dtype, self._window = graph, dtype, window
        self._processes = mesh_of_processes(mesh)
        self._at_once, self._longest = min(max(prompts, 1), MOST_AT_ONCE), longest
        self._known_tokens = known_tokens
        self._engine: Engine | None = None

    @contextlib.contextmanager
    def having(self, parameters: nnx.State, at: At) -> Iterator[Engine]:
        """Gives the engine these parameters within the block. All processes of a run call this
        together (`train.distributed.own_copy`); within, each decodes what it has. ``at`` is called
        what it waits for, such as a program that is compiled."""

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
                # No larger than needed: the rest of the memory is the optimizer's.
                config = EngineConfig(
                    window_size=self._window,
                    lookup=0,
                    max_batch_size=self._at_once,
                    max_model_len=self._longest,
                )
                self._engine = Engine(model, config, mesh=mesh, known_tokens=self._known_tokens)
            else:
                self._engine.update(model)
            del model
            self._engine.device.programs.while_busy = busy
            try:
                yield self._engine
            finally:
                self._engine.release()  # training needs the room


def decode_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    at: At,
    what: str = "prompts",
) -> list[Completion]:
    """Decodes prompts, of which there may be none, and waits for the last.

    Args:
      at: told how many are done.
      what: the prompts are called.
    """

    def told(finished: int) -> None:
        at(f"{finished} of {len(prompts)} {what} decoded")

    requests = [Request(number, prompt, params) for number, prompt in enumerate(prompts)]
    return engine.decode(requests, told, BURST) if requests else []


def can_decode(mesh: Mesh, hidden_size: int) -> bool:
    """Returns whether each process of a run can cut a copy of the parameters over its own devices;
    says so where it cannot."""
    devices = mesh_of_processes(mesh).local_mesh.shape["fsdp"]
    if hidden_size % devices:
        say(
            f"evaluation: takes losses only; hidden_size {hidden_size} is not divisible by "
            f"the {devices} devices of a process"
        )
        return False
    return True
