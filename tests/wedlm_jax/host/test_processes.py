"""Which of how many processes this is. What they do together: `checkpoint/test_model.py`, and
`tests/train/test_distributed.py` with real ones."""

import pytest

from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import Host, find_host


@pytest.mark.parametrize(
    ("count", "index", "environment", "expected"),
    [
        (None, None, {"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, Host()),
        ("4", 3, {}, Host(3, 4)),
        ("1", None, {}, Host()),
        ("4", None, {"JOB_COMPLETION_INDEX": "2"}, Host(2, 4)),
        ("auto", None, {"SLURM_NTASKS": "4", "SLURM_PROCID": "1"}, Host(1, 4)),
        ("auto", None, {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, Host(1, 2)),
        ("auto", None, {"TPU_WORKER_HOSTNAMES": "a,b,c", "TPU_WORKER_ID": "2"}, Host(2, 3)),
        ("auto", 0, {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, Host(0, 2)),
        ("auto", None, {"TPU_WORKER_HOSTNAMES": "localhost"}, Host()),
    ],
)
def test_which_host_this_is(count, index, environment, expected):
    assert find_host(count, index, environment) == expected


@pytest.mark.parametrize(
    ("count", "index", "message"),
    [
        (None, 2, "--host-id goes with --num-hosts"),
        ("0", None, "--num-hosts: expected a number of at least 1, or auto, not '0'"),
        ("many", 0, "--num-hosts: expected a number of at least 1, or auto, not 'many'"),
        ("2", 2, "--host-id: expected 0 to 1, not 2"),
        ("2", -1, "--host-id: expected 0 to 1, not -1"),
        ("2", None, "--host-id is missing, and none of JAX_PROCESS_ID, JOB_COMPLETION_INDEX, TPU"),
        ("auto", 0, "--num-hosts auto: none of JAX_NUM_PROCESSES, TPU_WORKER_HOSTNAMES, SLURM_NT"),
    ],
)
def test_numbers_that_do_not_fit(count, index, message):
    with pytest.raises(InputError, match=r".*") as refused:
        find_host(count, index, {})
    assert str(refused.value).startswith(message)


def test_messages_name_the_flags_of_the_command():
    with pytest.raises(InputError, match=r"^--process-id: expected 0 to 1, not 2$"):
        find_host("2", 2, {}, flags=("--num-processes", "--process-id"))
