"""The job under Ray Data, in a real cluster on this machine; skipped without Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.job.ray_job import SHARDS_PER_TASK, _groups
from infer.job.records import Place
from infer.job.row_index import Shard
from tests.infer.job.job_examples import contents, read_json, run, stop_after, words, write


@pytest.fixture(autouse=True)
def _load_once() -> None:
    """Not here: what loads the model goes to the actors."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_actors_finish_what_a_host_has_begun_and_give_the_same_rows(
    cluster: None, work: Path, model: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    rows = [*words(17), {"id": "bad", "promt": "a"}, {"prompt": "a", "sampling": {"seed": 1}}]
    write(rows)
    assert run(model, "--shard-size", "3", output="alone") == 0
    with monkeypatch.context() as patch:
        stop_after(2, KeyboardInterrupt(), patch)
        assert run(model, "--shard-size", "3", output="out") == 130
    capsys.readouterr()
    assert run(model, "--ray", "--ray-actors", "2", output="out") == 0
    said = capsys.readouterr().err
    assert "shards to finish, by 2 actors under Ray" in said
    assert contents("out") == contents("alone")
    ours, theirs = (read_json(f"{folder}/stats.json") for folder in ("out", "alone"))
    for stats in (ours, theirs):
        assert 0 < stats.pop("last_run")["rows"] <= len(rows)
    assert ours == theirs
    assert ours["error_rows"] == 1

    # What an actor refuses is one sentence here.
    assert run(model, "--ray", "--seed", "5", output="out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"wedlm generate: {work / 'out'}: holds 7 shards of another job (seed ")


@pytest.mark.parametrize("count", [0, 1, 5, 17])
@pytest.mark.parametrize("actors", [1, 2, 8])
def test_every_shard_is_of_one_task_and_every_actor_has_one(count: int, actors: int) -> None:
    shards = [Shard(3 * k, 0, 1, Place(0, 0, 1)) for k in range(count)]
    groups = _groups(shards, actors)
    assert groups
    assert [int(k) for group in groups for k in group.split()] == [s.number for s in shards]
    assert all(len(group.split()) <= SHARDS_PER_TASK for group in groups)
    if count >= actors * SHARDS_PER_TASK:
        assert len(groups) >= actors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ray", "--fail-fast"], "--fail-fast does not go with --ray"),
        (["--ray", "--ray-actors", "0"], "--ray-actors: expected 1 or more, not 0"),
        (["--ray-actors", "2"], "--ray-actors goes with --ray"),
        (["--ray", "--num-hosts", "2"], "--num-hosts does not go with --ray"),
    ],
)
def test_refused(
    work: Path, model: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr("infer.job.ray_job.require_ray", lambda: None)
    write(words(1))
    assert run(model, *options) == 2
    assert message in capsys.readouterr().err


def test_without_ray_one_sentence_says_how_to_get_it(
    work: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    write(words(1))
    assert run(model, "--ray") == 2
    said = capsys.readouterr().err
    assert said == (
        "wedlm generate: --ray needs Ray, which is not installed: pip install 'wedlm-jax[ray]'\n"
    )
