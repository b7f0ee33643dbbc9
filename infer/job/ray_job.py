"""Runs a job under Ray Data: one actor per accelerator, each with its own model.

The actors share only the job's folder, where they finish shards as any host does. So a job may be
started with Ray and finished without it, or the other way round.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infer.job.input import Shard, Workload
from infer.job.job import Job, Output, merged_before
from infer.job.result_record import Counts
from infer.job.shard_decoder import GracefulStop, JobProgress, ShardDecoder
from infer.job.shard_folder import ShardFolder, finished_shards, identity_of, read_job
from wedlm_jax.errors import (
    BadData,
    InputError,
    StorageFailure,
    counted,
    exit_status,
    require_extra,
    shortened,
)
from wedlm_jax.host.progress import ProgressBar

if TYPE_CHECKING:
    from wedlm_jax.llm import LLM

SHARDS_PER_TASK = 4
"""Shards that are decoded together: the batch runs empty only at the end of a task."""

ACCELERATORS = ("TPU", "GPU")
NOTHING: dict[str, Any] = {
    **Counts().as_json(),
    "earlier": 0,
    "compile_seconds": 0.0,
    "error": "",
    "status": 0,
}
"""An actor's report after a task with nothing to do."""


@dataclasses.dataclass(frozen=True)
class RayCluster:
    """The cluster that a job runs on.

    Attributes:
      address: empty for one that Ray finds, or otherwise a new local one.
      actors: number of actors; None for one per accelerator, or one if there is none.
    """

    address: str
    actors: int | None


def run_with_ray(job: Job, load: Callable[[], LLM], cluster: RayCluster) -> int:
    """Runs a job as `Job.run` does, with the actors of a cluster.

    Args:
      load: loads the model; called in each actor, so it must be picklable.

    Raises:
      InputError: Ray is missing or cannot be reached; or as `Job.run`.
    """
    ray = require_ray()
    if job.options.fail_fast:
        raise InputError("--fail-fast does not work with --ray; check the records without it first")
    if cluster.actors is not None and cluster.actors < 1:
        raise InputError(f"--ray-actors: expected 1 or more, not {cluster.actors}")
    _check_working_folder()
    mine = not ray.is_initialized()
    try:
        return job.until_stopped(lambda _: _run(ray, job, load, cluster))
    finally:
        if mine:
            ray.shutdown()


def require_ray() -> Any:
    """Returns the module `ray`, including Ray Data."""
    require_extra("--ray", "ray", "ray", "pyarrow")
    import ray
    import ray.data

    return ray


def _check_working_folder() -> None:
    """Refuses a working folder that contains another `infer`: Ray puts that folder first on the
    import path of its actors."""
    ours = Path(__file__).parents[1]
    for path in (Path("infer"), Path("infer.py")):
        if path.exists() and path.resolve() != ours:
            raise InputError(
                f"--ray: actors would import {path} of this folder instead of wedlm-jax's; "
                "start the command in another folder"
            )


def _run(ray: Any, job: Job, load: Callable[[], LLM], cluster: RayCluster) -> int:
    workload = job.read_input()
    index = workload.index
    # With --overwrite only an actor, which has the model, knows whether shards are of this job.
    overwrite, folder = job.options.overwrite, job.output.folder
    done = set() if overwrite else finished_shards(folder, index.shards)
    missing = [shard for shard in index.shards if shard.number not in done]
    _connect(ray, cluster.address)
    resources, count = _actors(ray, cluster.actors)
    groups = _groups(missing, count)
    job.say(
        f"{counted(len(missing), 'shard')} to finish, by {count} actors with Ray {ray.__version__}"
    )
    # Actors have their own working folders.
    files = tuple(dataclasses.replace(file, path=file.path.absolute()) for file in workload.files)
    shared = dataclasses.replace(workload, files=files)
    arguments = (shared, job.output.absolute(), job.options.overwrite, job.options.max_errors, load)
    results = _mapped(ray, groups, arguments, resources, count)
    earlier = index.records - sum(shard.records for shard in missing)
    progress = JobProgress(index.records, earlier=earlier)
    try:
        _follow(job, results, progress)
    finally:
        # The actors made the folder; there is no model here, so its identity is read from there.
        found = read_job(job.output.folder) or {}
        if found.get("input") == index.digest:
            del found["wedlm_generate"]
            job.open_folder(index, found)
    assert job.folder is not None, "an actor has opened it"
    if not missing and (status := job.finished_status(job.folder)) is not None:
        return status
    return job.end(job.folder, progress)


def _connect(ray: Any, address: str) -> None:
    if ray.is_initialized():
        return
    try:
        ray.init(address=address or None, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(
            f"--ray: cannot reach {address or 'a cluster'} ({shortened(str(error))})"
        ) from None


def _actors(ray: Any, count: int | None) -> tuple[dict[str, Any], int]:
    """Returns the resources of an actor, and how many actors to start."""
    resources = ray.cluster_resources()
    for kind in ACCELERATORS:
        if number := int(resources.get(kind, 0)):
            asked = {"num_gpus": 1} if kind == "GPU" else {"resources": {kind: 1}}
            return asked, count or number
    return {"num_cpus": 1}, count or 1


def _groups(shards: Sequence[Shard], actors: int) -> list[str]:
    """Returns the shard numbers of each task. There is at least one task, so that an actor checks
    which job the folder belongs to."""
    size = max(1, min(SHARDS_PER_TASK, math.ceil(len(shards) / actors)))
    numbers = [str(shard.number) for shard in shards]
    return [" ".join(numbers[i : i + size]) for i in range(0, len(numbers), size)] or [""]


def _mapped(
    ray: Any,
    groups: Sequence[str],
    arguments: tuple[Any, ...],
    resources: dict[str, Any],
    count: int,
) -> Iterable[dict[str, Any]]:
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    tasks = ray.data.from_items(
        [{"shards": group} for group in groups], override_num_blocks=len(groups)
    )
    return tasks.map_batches(  # type: ignore[no-any-return]
        _ShardActor,
        batch_size=1,
        fn_constructor_args=arguments,
        # No task should wait for a busy actor while another one is idle.
        compute=ray.data.ActorPoolStrategy(
            size=min(count, len(groups)), max_tasks_in_flight_per_actor=1
        ),
        **resources,
    ).iter_rows()


def _follow(job: Job, results: Iterable[dict[str, Any]], progress: JobProgress) -> None:
    """Adds up what the actors report after each task, and shows progress."""
    started = time.monotonic()
    errors = {exit_status(kind("")): kind for kind in (InputError, BadData, StorageFailure)}
    with ProgressBar("records", done=progress.done, console=job.console) as bar:
        for result in results:
            if result["error"]:
                raise errors[result["status"]](result["error"])
            progress.earlier += result["earlier"]
            progress.finished += Counts.from_json(result)
            progress.tokens = progress.finished.tokens
            progress.forwards = progress.finished.num_forwards
            # Actors compile concurrently.
            progress.compile_seconds = max(progress.compile_seconds, result["compile_seconds"])
            progress.seconds = time.monotonic() - started - progress.compile_seconds
            progress.show(bar)
            bad = f"those with an error in {job.output.folder}"
            progress.check_errors(job.options.max_errors, bad)


@dataclasses.dataclass
class _ShardActor:
    """Decodes tasks of a few shards each, with its own model."""

    workload: Workload
    output: Output
    overwrite: bool
    max_errors: int | None
    load: Callable[[], LLM]

    def __call__(self, task: dict[str, Any]) -> Iterator[dict[str, Any]]:
        numbers = [int(number) for number in task["shards"][0].split()]
        try:
            result = self._finish([self.workload.index.shards[k] for k in numbers])
        except (InputError, StorageFailure) as error:
            # Returned as data: Ray would wrap an exception, or retry the task as if a machine had
            # failed.
            result = {**NOTHING, "error": str(error), "status": exit_status(error)}
        yield {name: [value] for name, value in result.items()}

    @functools.cached_property
    def _opened(self) -> tuple[LLM, ShardFolder]:
        llm, shards = self.load(), self.workload.index.shards
        identity = identity_of(llm, self.workload)
        folder, file = self.output.folder, self.output.file
        return llm, ShardFolder(folder, identity, shards, file=file, overwrite=self.overwrite)

    def _finish(self, shards: Sequence[Shard]) -> dict[str, Any]:
        llm, folder = self._opened
        if merged_before(folder):
            return NOTHING
        finished = sum(shard.records for shard in shards if folder.is_finished(shard))
        # For one task; `_follow` adds them up.
        progress = JobProgress(sum(shard.records for shard in shards))
        decoder = ShardDecoder(
            llm,
            self.workload,
            folder,
            GracefulStop(),
            progress,
            most_errors=self.max_errors,
            first=False,
        )
        decoder.run(shards, lambda _: None)
        return {
            **NOTHING,
            **progress.finished.as_json(),
            "earlier": finished + progress.earlier,
            "compile_seconds": llm.engine.compile_seconds,
        }
