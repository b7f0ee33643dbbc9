"""`wedlm generate` in processes of their own, which tests may kill."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path

import jax

from tests.forward_sizes import one_size
from tests.infer.job.job_examples import SHAPE
from wedlm_jax.__main__ import main

PRELOADED = ["tests.infer.job.child", "infer.job.job", "wedlm_jax.llm", "transformers"]


def command_in_child(arguments: list[str], said: str) -> None:
    """What it prints goes into the file ``said``."""
    with open(said, "a", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Every one of them compiles the same programs, which then takes no time.
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
        one_size()
        sys.exit(main(["generate", *arguments]))


def start(model: Path, *options: str, output: str = "out") -> BaseProcess:
    """For `multiprocessing`: its server has imported the project already, so that a child is
    ready in a moment."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    arguments = ["--model", str(model), "--input", "in.jsonl", "--output", output]
    child = context.Process(
        target=command_in_child, args=([*arguments, *SHAPE, *options], "said.txt")
    )
    child.start()
    return child
