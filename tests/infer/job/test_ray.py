"""The job under Ray Data, in a real cluster on this machine; skipped without Ray."""

import itertools
import sys
from pathlib import Path

import pytest

from infer import generate
from infer.job.input import Place, Shard, Workload, build_index, find_input
from infer.job.job import find_output
from infer.job.ray_job import SHARDS_PER_TASK, _groups, _ShardActor
from tests.infer.job.job_examples import contents, interrupt, read_json, results, run, words, write
from wedlm_jax.params import SamplingParams


@pytest.fixture(autouse=True)
def _load_once():
    """Not here: what loads the model goes to the actors."""


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=3, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_actors_finish_what_a_host_has_begun_and_give_the_same_rows(cluster, work, model, capsys):
    several = {"seed": 1, "temperature": 1.0, "n": 3}
    records = [*words(17), {"id": "bad", "promt": "a"}, {"prompt": "a", "sampling": several}]
    write(records)
    assert run(model, "--shard-size", "3", output="alone") == 0
    interrupt(2, model, "--shard-size", "3", output="out")
    capsys.readouterr()
    assert run(model, "--ray", "--ray-actors", "2", output="out") == 0
    printed = capsys.readouterr().err
    assert "shards to finish, by 2 actors with Ray" in printed
    assert contents("out") == contents("alone")
    ours, theirs = (read_json(f"{folder}/stats.json") for folder in ("out", "alone"))
    for stats in (ours, theirs):
        assert 0 < stats.pop("last_run")["rows"] <= len(records)
    assert ours == theirs
    assert ours["error_rows"] == 1

    # What an actor refuses is one sentence here.
    assert run(model, "--ray", "--seed", "5", output="out") == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"wedlm generate: {work / 'out'}: holds 7 shards of another job (seed ")
    assert run(model, "--ray", "--seed", "5", "--overwrite", output="out") == 0
    assert run(model, "--seed", "5", "--shard-size", "3", output="alone") == 2
    assert run(model, "--seed", "5", "--shard-size", "3", output="seed 5") == 0
    assert contents("out") == contents("seed 5")


def actor(model, output="out.jsonl", seed=0):
    """As Ray would make it."""
    source = find_input(["in.jsonl"])
    params = SamplingParams(max_tokens=24, seed=seed)
    workload = Workload(source.files, build_index(source.files, 3), params, False)
    options = {"model": str(model), "window_size": 4, "batch_size": 4}
    where = find_output(output, source).absolute()
    return _ShardActor(workload, where, False, None, lambda: generate.load(options))


def call(one, shards):
    (result,) = one({"shards": [shards]})
    return {name: value for name, (value,) in result.items()}


def test_an_actor_finishes_the_shards_it_is_given(model, quick):
    sampling = {"temperature": 1.0, "n": 3, "logprobs": 2}
    write([*words(8), {"prompt": "a", "sampling": sampling}, {"promt": "a"}])
    one = actor(model, output="out")
    done = call(one, "3 1")
    assert (done["rows"], done["error_rows"], done["earlier"], done["error"]) == (4, 1, 0, "")
    assert sorted(path.name for path in Path("out").glob("*.jsonl")) == [
        "rows-00001-of-00004.jsonl",
        "rows-00003-of-00004.jsonl",
    ]
    assert call(one, "3 1")["rows"] == 0, "a task that is given again does nothing twice"
    assert "holds 2 shards of another job" in call(actor(model, "out", seed=1), "0")["error"]
    assert call(one, "0 2")["rows"] == 6
    assert run(model, output="out") == 0
    assert run(model, output="alone") == 0
    assert results("out") == results("alone")


def test_an_actor_leaves_a_job_that_has_ended_alone(model, quick, decoded):
    write(words(9))
    assert run(model, "--shard-size", "3") == 0
    before = Path("out.jsonl").read_bytes()
    decoded.clear()
    assert call(actor(model), "0 1 2")["rows"] == 0
    assert not decoded
    assert Path("out.jsonl").read_bytes() == before


def test_every_shard_is_of_one_task_and_every_actor_has_one():
    for count, actors in itertools.product((0, 1, 5, 17), (1, 2, 8)):
        shards = [Shard(3 * k, 0, 1, Place(0, 0, 1)) for k in range(count)]
        groups = _groups(shards, actors)
        assert groups
        assert [int(k) for group in groups for k in group.split()] == [s.number for s in shards]
        assert all(len(group.split()) <= SHARDS_PER_TASK for group in groups)
        if count >= actors * SHARDS_PER_TASK:
            assert len(groups) >= actors


NOT_INSTALLED = '--ray needs ray, which is not installed: pip install "wedlm-jax[ray]"\n'
WITHOUT_RAY = [
    ("--ray --fail-fast", "--fail-fast does not work with --ray"),
    ("--ray --ray-actors 0", "--ray-actors: expected 1 or more, not 0"),
    ("--ray-actors 2", "--ray-actors goes with --ray"),
    ("--ray --num-hosts 2", "--num-hosts does not go with --ray"),
    ("--ray", NOT_INSTALLED),
    ("--ray", "--ray: actors would import infer.py of this folder"),
]


@pytest.mark.parametrize(("options", "message"), WITHOUT_RAY)
def test_refused(model, options, message, capsys, monkeypatch):
    write(words(1))
    monkeypatch.setitem(sys.modules, "ray", None)
    if message != NOT_INSTALLED:
        monkeypatch.setattr("infer.job.ray_job.require_ray", lambda: None)
    if "infer.py" in message:
        Path("infer.py").touch()
    assert run(model, *options.split()) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(f"wedlm generate: {message}")
    assert printed.count("\n") == 1
