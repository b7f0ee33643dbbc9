"""`wedlm train`: a recipe, overrides, and the loop."""

from __future__ import annotations

import argparse

from train.config import describe, load_config


def main(arguments: list[str]) -> int:
    fields = "\n".join(f"  {name:<32} {what} [{default}]" for name, default, what in describe())
    parser = argparse.ArgumentParser(
        prog="wedlm train",
        description="Trains a model: AR pretraining, or WeDLM continuation of a checkpoint.\n"
        "A run that was stopped goes on where its last checkpoint stands.",
        epilog=f"fields of the recipe, with their defaults:\n{fields}\n\nexample:\n"
        "  wedlm train --config configs/embedded_wedlm.yaml steps=500 optimizer.learning_rate=1e-3",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="a YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="replace a field")
    options = parser.parse_args(arguments)
    config = load_config(options.config, options.overrides)

    from train.loop import train

    print(f"exported {train(config)}")
    return 0
