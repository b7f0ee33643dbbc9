"""Two processes with two devices each import and export one checkpoint together."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.checkpoints import assert_same_bits, hf_values, write_tiny

ROOT = Path(__file__).parents[3]


def run_two(source: Path, *destinations: Path) -> list[tuple[int, str]]:
    """Exit status and standard error of each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.hf_process", str(i), str(port), source, *destinations],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        texts = [child.communicate(timeout=600)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    return [(child.returncode, text) for child, text in zip(children, texts, strict=True)]


@pytest.mark.full
def test_two_processes_write_one_checkpoint(tmp_path: Path) -> None:
    source, back = write_tiny(tmp_path / "a", dtype="bfloat16", shard_bytes=8000), tmp_path / "b"
    (tmp_path / "c").write_text("x")
    (status, told), (other, heard) = run_two(source, back, tmp_path / "c")
    assert_same_bits(hf_values(back), hf_values(source))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    # And where they cannot, both say so and end.
    assert (status, other) == (1, 1), told + heard
    assert "is a file" in told
    assert "another process of the job failed" in heard
