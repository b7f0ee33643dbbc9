"""SIGTERM: a run that is asked to end saves its state first."""

from __future__ import annotations

from jax.experimental import multihost_utils

from wedlm_jax.processes import jax_processes
from wedlm_jax.signals import StopRequest


class RunStopped(Exception):
    """The run ended on request, with its state saved.

    Attributes:
      step: completed steps.
    """

    def __init__(self, step: int):
        super().__init__(f"stopped after step {step}")
        self.step = step


class AgreedStop(StopRequest):
    """Stops all processes of a run after the same step, when SIGTERM has come to one of them.

    They agree through the coordinator that `jax.distributed` started.
    """

    def __init__(self) -> None:
        super().__init__()
        self._alone = jax_processes().count == 1
        self._handles &= self._alone  # the coordinator handles the signal of several

    def after(self, step: int) -> bool:
        """Returns whether the run shall stop after ``step`` completed steps. Every process asks
        once after every step."""
        if self._alone:
            return self.requested
        return multihost_utils.reached_preemption_sync_point(step)
