"""`wedlm bench --predict`: whether windows would pay on TPUs that are not here.

The prediction uses the compiled program and the chips' published figures; nothing is run. Whether
windows pay depends on two numbers. One depends on the chip: how many AR forwards a forward with
windows costs. It is predicted here. The other depends on the text: how many tokens such a forward
commits. It can be measured on any machine (`wedlm bench`, tokens / forward). Windows pay where the
second is greater than the first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from infer.bench.measure import Report, status, table
from infer.compile_only import (
    BANDWIDTH,
    GIB,
    PRODUCTS,
    DecodeSizes,
    compile_decoder,
    decode_mesh,
    read_drafter,
    read_model,
)
from wedlm_jax.aot.topology import describe_topology
from wedlm_jax.errors import InputError

MODEL_LEN = 1536
"""Length of the texts, in tokens, in the predicted forward."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """A forward of full windows after texts of full length.

    Attributes:
      sequences, window: number of sequences that decode together, and W; 0 for AR.
      tokens: tokens of a replica's forward.
      peak_gib: peak memory of a chip in GiB, from the compiler.
      bound: what limits the forward: compute, memory or network.
      milliseconds: the expected time of the forward.
    """

    sequences: int
    window: int
    tokens: int
    peak_gib: float
    bound: str
    milliseconds: float


def predict(options: Mapping[str, Any], report: Report) -> None:
    """Compiles each window for each number of sequences, and reports what a forward would take."""
    if "model" not in options:
        raise InputError("--predict needs --model: a folder, or a recipe with its sizes")
    topology, asked = options["predict"], options["window_size"]
    if "auto" in asked:
        raise InputError("--predict: expected numbers for --window-size, not auto")
    model = read_model(options["model"])
    drafter = None if options.get("drafter") is None else read_drafter(options["drafter"])
    if any(asked) and not (model.knows_masks or drafter):
        raise InputError(
            f"--predict: {options['model']} was not trained on masks; give a --drafter, or "
            "--window-size 0"
        )
    replicas = decode_mesh(model, describe_topology(topology)).shape["data"]
    # Each replica has the same number of sequences.
    for sequences in dict.fromkeys(-(-n // replicas) * replicas for n in options["batch_size"]):
        found = []
        for window in sorted({0, *asked}):
            with status(f"compiling for {topology}: {sequences} sequences, W = {window}"):
                backup = min(options.get("backup_masks", 0), window)
                sizes = DecodeSizes(sequences, MODEL_LEN, window, backup=backup)
                made = compile_decoder(model, topology, sizes, drafter=drafter)
            forward = made.forward
            found.append(
                Prediction(
                    sequences,
                    window,
                    forward.tokens,
                    made.program.peak_bytes / GIB,
                    forward.bound.bound,
                    1e3 * forward.expected,
                )
            )
        report.add("predictions", found, predicted_table(topology, found))


def predicted_table(topology: str, found: Sequence[Prediction]) -> Any:
    """Makes the table for one number of sequences; the first row is AR's."""
    ar = found[0]
    rows = [
        {
            "way": f"W = {one.window}" if one.window else "AR",
            "tokens": one.tokens,
            "GiB per chip": one.peak_gib,
            "limited by": one.bound,
            "a forward, ms": one.milliseconds,
            "pays from, tokens / forward": f"{one.milliseconds / ar.milliseconds:.2f}",
            "AR tokens/s": f"{1e3 * ar.sequences / ar.milliseconds:,.0f}" if one is ar else "",
        }
        for one in found
    ]
    caption = (
        f"predicted, not run: products at {PRODUCTS:.0%} and memory at {BANDWIDTH:.0%} of the "
        "chip's peaks"
    )
    return table(f"{topology}, {ar.sequences} at a time", rows, caption=caption)
