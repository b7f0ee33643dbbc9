"""`wedlm export`: a checkpoint under the name of the Qwen that has its parameters."""

from __future__ import annotations

from wedlm_jax.checkpoint.convert import run
from wedlm_jax.checkpoint.dtypes import DTYPES
from wedlm_jax.host.command_line import CommandParser


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm export",
        description="Writes a checkpoint for transformers, vLLM and others that know Qwen but not\n"
        "WeDLM, and decode it autoregressively: Hugging Face's files, named qwen3 or\n"
        "qwen2 by the parameters. SOURCE is any that `wedlm convert` reads.",
        epilog="example:\n  wedlm export runs/mine/hf mine-qwen --dtype bfloat16",
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint folder, or a training run's")
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights [as they are]")
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that DESTINATION holds"
    )
    parser.set_defaults(to="hf", model_type="qwen", config=None)
    return run(parser.parse_args(arguments))
