"""`python -m infer.harness`: the command `lm_eval` with the model `wedlm` registered.

For versions of lm_eval that do not look for models in other packages, such as 0.4.13.
"""

from __future__ import annotations

import sys

from infer.harness.command import TASKS
from wedlm_jax.errors import require_extra
from wedlm_jax.host.command_line import run_command
from wedlm_jax.host.signals import exit_process


def main(arguments: list[str]) -> None:
    require_extra("this command", "eval", "lm_eval")
    from lm_eval.__main__ import cli_evaluate

    import infer.harness.model  # noqa: F401  (registers the model)

    if "--model" in arguments and "--include_path" not in arguments:
        arguments = [*arguments, "--include_path", str(TASKS)]
    sys.argv = ["lm_eval", *arguments]
    cli_evaluate()


if __name__ == "__main__":
    exit_process(run_command("lm_eval", lambda: main(sys.argv[1:])))
