"""Python in a process of its own."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_python(*arguments, timeout=600, **options):
    """Runs ``python`` with these arguments; returns its status and what it printed."""
    command = [sys.executable, *map(str, arguments)]
    options = {"cwd": ROOT, "capture_output": True, "text": True, **options}
    return subprocess.run(command, timeout=timeout, check=False, **options)


def heavy_imports(*arguments):
    """Runs a ``wedlm`` command that should start fast; returns its output and which slow modules
    it imported."""
    heavy = {"jax", "numpy", "flax", "orbax", "transformers", "rich"}
    program = (
        "import sys; from wedlm_jax.__main__ import main\n"
        f"try: main({list(map(str, arguments))!r})\n"
        f"finally: print(*sorted({heavy!r} & set(sys.modules)))"
    )
    *printed, imported = run_python("-c", program, timeout=60).stdout.split("\n")[:-1]
    return "\n".join(printed), imported.split()
