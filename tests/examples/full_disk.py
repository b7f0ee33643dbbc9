"""A disk that fills up under a command: a small one, or a limit on the size of files."""

import contextlib
import subprocess

import pytest

from tests.examples.child import run_python

SMALL_FILES = """
import resource, sys
from wedlm_jax.__main__ import main
resource.setrlimit(resource.RLIMIT_FSIZE, ({size}, {size}))
sys.exit(main({arguments!r}))
"""


def run_with_small_files(arguments, size):
    """Runs ``wedlm`` in a process where no file may grow beyond ``size`` bytes."""
    code = SMALL_FILES.format(size=size, arguments=list(arguments))
    return run_python("-c", code, timeout=300)


def make_read_only(disk):
    """Lets nobody write on a `small_disk` any more."""
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


@contextlib.contextmanager
def small_disk(folder, size):
    """Mounts a disk of so many bytes at ``folder``; skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        done = False
    if not done:
        pytest.skip("no disk may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
