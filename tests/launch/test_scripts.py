"""The launch scripts, run with stand-ins for Slurm, ssh and the training command."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from train.recipe.config import load_config
from wedlm_jax.errors import BAD_DATA, BAD_INPUT, EXIT_STATUS, INTERRUPTED, TERMINATED

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"


def script(path, text):
    path.write_text("#!/bin/bash\n" + text)
    path.chmod(0o755)
    return path


def run(command, folder, **environment):
    path = f"{folder}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ends_with(folder, *statuses):
    """A command that ends with one status after another, and notes each call."""
    text = f"""echo "$@" >> calls
set -- {" ".join(map(str, statuses))}
shift $(($(wc -l < calls) - 1))
exit $1
"""
    return script(folder / "work", text)


def calls(folder):
    return (folder / "calls").read_text().splitlines()


@pytest.mark.skipif(shutil.which("shellcheck", path=Path(sys.executable).parent) is None, reason="")
def test_shellcheck_finds_nothing():
    shellcheck = str(Path(sys.executable).parent / "shellcheck")
    files = [str(path) for path in LAUNCH.glob("*.sh")]
    assert len(files) == 3
    found = subprocess.run([shellcheck, *files], capture_output=True, text=True, check=False)
    assert found.stdout == ""


@pytest.mark.parametrize(
    ("statuses", "limit", "end", "restarts"),
    [([1, 137, 0], 5, 0, 2), ([1, 2], 5, 2, 1), ([9, 9, 9], 2, 9, 2)],
)
def test_a_restart_loop_ends_when_a_restart_would_not_help(
    tmp_path, statuses, limit, end, restarts
):
    command = [str(LAUNCH / "restart.sh"), str(ends_with(tmp_path, *statuses)), "a b", "c"]
    ended = run(command, tmp_path, MAX_RESTARTS=str(limit), PAUSE="0")
    assert ended.returncode == end, ended.stderr
    assert calls(tmp_path) == ["a b c"] * (restarts + 1)
    assert ended.stderr.count("; restart ") == restarts


@pytest.mark.parametrize("status", EXIT_STATUS)
def test_the_scripts_follow_the_table_of_statuses(tmp_path, status):
    """Slurm itself ends jobs whose time is over, so there what was ended is queued again."""
    work = ends_with(tmp_path, status, 0)
    ended = run([str(LAUNCH / "restart.sh"), str(work)], tmp_path, PAUSE="0")
    final = (0, BAD_INPUT, BAD_DATA, INTERRUPTED, TERMINATED)
    assert ended.returncode == (status if status in final else 0)
    assert len(calls(tmp_path)) == (1 if status in final else 2)
    script(tmp_path / "srun", f'echo "$@" > srun.txt; exit {status}')
    script(tmp_path / "scontrol", 'echo "$@" > scontrol.txt')
    job = [str(LAUNCH / "slurm.sh"), "wedlm", "train", "data.sources={a: 1}"]
    ended = run(job, tmp_path, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="3")
    assert (tmp_path / "srun.txt").read_text().endswith("wedlm train data.sources={a: 1}\n")
    if status in (0, BAD_INPUT, BAD_DATA):
        assert ended.returncode == status
        assert not (tmp_path / "scontrol.txt").exists()
        return
    assert ended.returncode == 0
    assert (tmp_path / "scontrol.txt").read_text() == "requeue 17\n"
    (tmp_path / "scontrol.txt").unlink()
    assert run(job, tmp_path, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="20").returncode == status
    assert not (tmp_path / "scontrol.txt").exists()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_restart_loop_waits_for_a_command_that_was_asked_to_end(tmp_path, number, status):
    work = script(
        tmp_path / "work",
        "trap 'sleep 0.3; echo saved > saved; exit 143' TERM\n"
        "trap 'sleep 0.3; echo saved > saved; exit 130' INT\n"
        "touch begun\nwhile true; do sleep 0.05; done\n",
    )
    loop = subprocess.Popen([LAUNCH / "restart.sh", work], cwd=tmp_path)
    while not (tmp_path / "begun").exists():
        assert loop.poll() is None
        time.sleep(0.02)
    loop.send_signal(number)
    assert loop.wait(30) == status
    assert (tmp_path / "saved").exists()


def test_plain_processes_get_their_numbers_and_remote_ones_their_quotes(tmp_path):
    work = script(tmp_path / "work", 'printf "%s|" "$@" >> "calls-${@: -1}"')
    local = run([str(LAUNCH / "processes.sh"), str(work), "a b"], tmp_path, HOSTS="local:2")
    assert local.returncode == 0, local.stderr
    for number in (0, 1):
        assert (tmp_path / f"calls-{number}").read_text() == (
            f"a b|--coordinator|localhost:8476|--num-processes|2|--process-id|{number}|"
        )
        (tmp_path / f"calls-{number}").unlink()
    remote = script(tmp_path / "remote", 'echo "$1" >> hosts; bash -c "$2"')
    command = [str(LAUNCH / "processes.sh"), str(work), "data={a: 1}", "it's"]
    ended = run(command, tmp_path, HOSTS="one,two", REMOTE=str(remote), PORT="99")
    assert ended.returncode == 0, ended.stderr
    assert sorted((tmp_path / "hosts").read_text().split()) == ["one", "two"]
    assert (tmp_path / "calls-1").read_text() == (
        "data={a: 1}|it's|--coordinator|one:99|--num-processes|2|--process-id|1|"
    )


def test_when_one_process_fails_the_others_are_told_to_end(tmp_path):
    work = script(
        tmp_path / "work",
        "trap 'echo saved > saved; exit 143' TERM\n"
        'if [ "${@: -1}" = 1 ]; then until [ -e begun ]; do sleep 0.02; done; exit 7; fi\n'
        "touch begun\n"
        "for ((i = 0; i < 400; i++)); do sleep 0.05; done\n",
    )
    ended = run([str(LAUNCH / "processes.sh"), str(work)], tmp_path, HOSTS="local:2")
    assert ended.returncode == 7
    assert (tmp_path / "saved").exists()


def test_the_jobset_is_what_the_page_says_and_its_command_is_one_of_ours():
    job = yaml.safe_load((LAUNCH / "jobset.yaml").read_text())
    spec = job["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    x, y, z = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert spec["parallelism"] * container["resources"]["limits"]["google.com/tpu"] == x * y * z
    assert spec["parallelism"] == spec["completions"]
    # The default of 30 seconds is not enough to save the state of an 8B model.
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert spec["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"] == [BAD_INPUT]
    assert container["command"][:2] == ["wedlm", "train"]
    config = load_config(ROOT / container["command"][3], container["args"])
    assert config.data.sources == {"/mnt/share/data/corpus": 1.0}


def test_the_manifest_of_a_decoding_job_gives_up_on_bad_input_alone():
    page = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    job = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    first, second = job["spec"]["podFailurePolicy"]["rules"]
    assert (first["action"], first["onExitCodes"]["values"]) == ("FailJob", [BAD_INPUT, BAD_DATA])
    assert (second["action"], "onExitCodes" in second) == ("Ignore", False)
