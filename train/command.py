"""`wedlm train`: a recipe, overrides, and the loop."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from train.distributed import EndTogether, add_options, join
from train.recipe.config import describe, load_config
from wedlm_jax.checkpoint.open import packaged
from wedlm_jax.errors import INTERRUPTED, CompilingInterrupted
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.processes import say
from wedlm_jax.host.storage import as_path

GOES_ON = "the same command continues from the newest state, or starts over if there is none"


class _RecipeParser(CommandParser):
    """A parser that explains how to set a field of the recipe if it was given as an option."""

    def error(self, message: str) -> NoReturn:
        option = message.partition("unrecognized arguments: --")[2].partition(" ")[0]
        field = option.partition("=")[0].replace("-", "_")
        known = field in {name for name, _, _ in describe()}
        super().error(message + (f"; fields are given as {field}=VALUE" if known else ""))


def main(arguments: list[str]) -> int:
    fields = "\n".join(f"  {name:<32} {what} [{default}]" for name, default, what in describe())
    parser = _RecipeParser(
        prog="wedlm train",
        description="Trains a model: AR pretraining, WeDLM training of a checkpoint, or a drafter\n"
        "for one. A run that was stopped continues from its last checkpoint.",
        epilog=f"fields of the recipe, with their defaults:\n{fields}\n\nexample:\n"
        "  wedlm train --config configs/embedded_wedlm.yaml steps=500 optimizer.learning_rate=1e-3",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML recipe")
    parser.add_argument(
        "--compile-only",
        action="store_true",
        help="compile the step for --topology, report its costs, and stop; needs no TPU",
    )
    parser.add_argument(
        "--topology",
        metavar="NAME",
        default="v5p:4x4x4",
        help="chip and shape to compile for: v5e:16x16, v5p:8x8x8*2 (two slices) [%(default)s]",
    )
    parser.add_argument(
        "--allow-changed",
        action="store_true",
        help="continue a run although its recipe has changed since it began",
    )
    add_options(parser)
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="replace a field; +KEY=VALUE adds to a mapping such as data.sources",
    )
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.overrides)
    if config.model.init_from is not None:
        config.model.init_from = packaged(config.model.init_from)
    if config.data.tokenizer is not None:
        config.data.tokenizer = packaged(config.data.tokenizer)

    if options.compile_only:
        from train.compile_only import compile_phases
        from train.compile_only import describe as describe_step

        for phase, step in compile_phases(config, options.topology):
            if config.phases:
                print(f"from step {phase.first}:")
            print(describe_step(step), flush=True)
        return 0

    from train.loop import RunStopped, train

    join(options)
    from wedlm_jax.host.compiled_cache import keep_compiled

    keep_compiled(as_path(config.output) / "compiled")
    try:
        with EndTogether():
            try:
                folder = train(config, allow_changed=options.allow_changed)
            except (RunStopped, CompilingInterrupted) as stopped:
                saved = isinstance(stopped, RunStopped)
                goes_on = "the same command continues from there" if saved else GOES_ON
                print(f"wedlm train: {stopped}; {goes_on}", file=sys.stderr, flush=True)
                return stopped.status
    except KeyboardInterrupt:
        print(f"wedlm train: interrupted; {GOES_ON}", file=sys.stderr)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(INTERRUPTED)  # Python would wait for the steps still running on the devices
    say(f"exported {folder}")
    return 0
