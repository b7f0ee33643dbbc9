"""`wedlm export`: a checkpoint under the name of a stock model that has its parameters."""

from __future__ import annotations

from wedlm_jax.checkpoint.convert import run
from wedlm_jax.checkpoint.dtypes import DTYPES
from wedlm_jax.config import STOCK
from wedlm_jax.host.command_line import CommandParser


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm export",
        description="Writes a checkpoint for transformers, vLLM and others that do not know WeDLM\n"
        "and decode it autoregressively: a Hugging Face folder of model type qwen3, qwen2 or\n"
        "llama, whichever has the parameters. SOURCE may be whatever `wedlm convert` reads.",
        epilog="example:\n  wedlm export runs/mine/hf mine-qwen --dtype bfloat16",
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint folder, or a training run's")
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights [as they are]")
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that DESTINATION holds"
    )
    parser.set_defaults(to="hf", model_type=STOCK, config=None)
    return run(parser.parse_args(arguments))
