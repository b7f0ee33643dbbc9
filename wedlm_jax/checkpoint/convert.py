"""`wedlm convert`: converts checkpoints between Hugging Face and orbax, bit for bit, and from GGUF.
`wedlm export`: writes any of these for programs that do not know WeDLM."""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from pathlib import Path

import numpy as np

from wedlm_jax.checkpoint import HF, ORBAX, PEFT, RUN, TITLES
from wedlm_jax.checkpoint.hf import Checkpoint, write_config, write_weights
from wedlm_jax.checkpoint.open import kind_of, open_checkpoint, packaged_file
from wedlm_jax.checkpoint.safetensors import DTYPES, DeferredArray, SafetensorsFile, numpy_dtype
from wedlm_jax.config import MODEL_TYPES, STOCK, with_model_type
from wedlm_jax.errors import InputError, StorageFailure
from wedlm_jax.host.atomic import naming, replacing
from wedlm_jax.host.command_line import CommandParser
from wedlm_jax.host.progress import ProgressBar
from wedlm_jax.host.storage import absolute, as_path, copy_file, is_of_storage, storage_message

FORMATS = (HF, ORBAX)


@dataclasses.dataclass(frozen=True)
class Converted:
    """What `convert` wrote: the format ("hf" or "orbax"), how many tensors and bytes, and the
    names of their dtypes."""

    format: str
    tensors: int
    bytes: int
    dtypes: tuple[str, ...]


def main(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm convert",
        description="Converts a checkpoint folder: Hugging Face (config.json and safetensors) to\n"
        f"orbax (config.json and {ORBAX}/), or back. The format of SOURCE is detected; the other\n"
        "one is written, or the one that --to names. config.json and the tokenizer's files are\n"
        "included. Values are not changed unless --dtype is given. A GGUF file of llama.cpp\n"
        "becomes a Hugging Face folder, with quantized values in float32.",
        epilog="examples:\n"
        "  wedlm convert ./WeDLM-8B ./WeDLM-8B-orbax            Hugging Face to orbax\n"
        "  wedlm convert ./WeDLM-8B-orbax ./back                and back, bit for bit\n"
        "  wedlm convert runs/my/hf ./small --to hf --dtype bfloat16\n"
        "                                                       same format, another dtype\n"
        "  wedlm convert model.gguf ./model --dtype bfloat16    llama.cpp's file to Hugging Face\n"
        "  wedlm convert runs/my ./now                          a run's newest state, while it\n"
        "                                                       trains: a model, or a drafter's\n"
        "                                                       adapters\n"
        "  wedlm convert runs/my/hf ./qwen --model-type qwen3\n"
        "                                                       for transformers, as a Qwen3",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a checkpoint's or a run's folder, a GGUF file, or smollm2"
    )
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write")
    parser.add_argument(
        "--to", choices=FORMATS, help="the format to write [the other one; hf with --model-type]"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights [unchanged]")
    parser.add_argument(
        "--model-type",
        choices=(*MODEL_TYPES, STOCK),
        help="the model type in config.json, for programs that do not know wedlm and decode it "
        f"autoregressively; {STOCK}: whichever of qwen3, qwen2 and llama fits [unchanged]",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that DESTINATION holds"
    )
    return _run(parser.parse_args(arguments))


def export(arguments: list[str]) -> int:
    parser = CommandParser(
        prog="wedlm export",
        description="Writes a checkpoint for transformers, vLLM and others that do not know WeDLM\n"
        "and decode it autoregressively: a Hugging Face folder of model type qwen3, qwen2 or\n"
        "llama, whichever has the same parameters. SOURCE is anything that `wedlm convert` reads.",
        epilog="example:\n  wedlm export runs/mine/hf mine-qwen --dtype bfloat16",
    )
    parser.add_argument("source", metavar="SOURCE", help="a checkpoint or training-run folder")
    parser.add_argument("destination", metavar="DESTINATION", help="the folder to write")
    parser.add_argument("--dtype", choices=DTYPES, help="cast the weights [unchanged]")
    parser.add_argument(
        "--force", action="store_true", help="replace the checkpoint that DESTINATION holds"
    )
    parser.set_defaults(to=HF, model_type=STOCK)
    return _run(parser.parse_args(arguments))


def _run(options: argparse.Namespace) -> int:
    """Converts as ``options`` say, and prints what was written."""
    # Nothing here is computed on a device, and a device that is in use should be left alone.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    start = time.monotonic()
    done = convert(**vars(options))
    file = packaged_file(options.source)
    from_file = "" if file is None else f" from {file}"
    print(
        f"wrote {options.destination}{from_file}: {TITLES[done.format]}, {done.tensors} tensors, "
        f"{done.bytes / 1e6:,.1f} MB, {', '.join(done.dtypes)}, "
        f"in {time.monotonic() - start:.1f} s"
    )
    return 0


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    to: str | None = None,
    dtype: str | None = None,
    model_type: str | None = None,
    force: bool = False,
) -> Converted:
    """Converts a checkpoint to the other format, another dtype or another model type.

    The destination appears whole or not at all.

    Args:
      source: a Hugging Face or orbax checkpoint folder; a PEFT folder, whose adapters are merged; a
        GGUF file; or a training run's folder, its ``checkpoints`` or one state in them. For a run,
        the newest state's parameters are written (not their average), or a drafter's adapters.
      destination: folder to write; must be absent or empty, or with ``force`` a checkpoint.
      to: "hf" or "orbax"; by default "hf" for a run and with ``model_type``, else the format that
        the source does not have.
      dtype: "float32", "bfloat16" or "float16"; unchanged by default.
      model_type: the type in ``config.json``, as for `with_model_type`; unchanged by default.
      force: whether to replace a checkpoint at the destination.

    Raises:
      InputError: the message names the folder, file or tensor, and what was expected.
      StorageFailure: the disk is full, or storage does not answer.
    """
    source, destination = as_path(packaged_file(source) or source), as_path(destination)
    found = kind_of(source)
    given = to or model_type
    other = ORBAX if found == HF else HF
    target = to or (other if model_type is None else HF)
    if target not in FORMATS:
        raise InputError(f"to: expected one of {', '.join(FORMATS)}, not {target!r}")
    if target == found and dtype is None and model_type is None:
        raise InputError(
            f"{source}: is {TITLES[found]} already; to write the same format, give a dtype or a "
            "model type"
        )
    _check_destination(source, destination, force)
    if found == RUN and (written := _write_drafter(source, destination, dtype, given)):
        return written
    np_dtype = numpy_dtype(dtype)
    bar = ProgressBar("tensors", title="converting")
    try:
        with naming(destination), replacing(destination) as new_folder, bar:
            opened = open_checkpoint(source)
            raw = opened.raw_config
            if dtype is not None:  # under the name that the file uses
                older = "torch_dtype" in raw and "dtype" not in raw
                raw = {**raw, "torch_dtype" if older else "dtype": dtype}
            if model_type is not None:  # refused before any value is read
                raw = with_model_type(raw, model_type, opened.config)
            result = _write(opened, np_dtype, target, new_folder, bar)
            if raw is opened.raw_config and found in FORMATS:
                copy_file(source / "config.json", new_folder / "config.json")
            else:
                write_config(new_folder, raw)
            opened.write_tokenizer(new_folder)
    except Exception as error:
        if isinstance(error, InputError | StorageFailure) or not is_of_storage(error):
            raise
        # Orbax wraps errors of storage in its own.
        raise StorageFailure(
            f"{destination}: cannot be written ({storage_message(error)})"
        ) from None
    return result


def _write_drafter(
    run: Path, destination: Path, dtype: str | None, given: str | None
) -> Converted | None:
    """Writes the drafter that a run trains; returns None if the run trains a model."""
    from wedlm_jax.checkpoint.adapters import ADAPTER_WEIGHTS, save_drafter
    from wedlm_jax.checkpoint.orbax import drafter_of_run

    drafter = drafter_of_run(run)
    if drafter is None:
        return None
    if given is not None:
        raise InputError(
            f"{run}: this run trains a drafter, which has one format and no model type"
        )
    adapters, lora, base = drafter
    dtype = dtype or "bfloat16"
    save_drafter(adapters, lora, destination, base=base, dtype=dtype)
    tensors = SafetensorsFile(destination / ADAPTER_WEIGHTS).tensors.values()
    return Converted(PEFT, len(tensors), sum(tensor.nbytes for tensor in tensors), (dtype,))


def _check_destination(source: Path, destination: Path, force: bool) -> None:
    here, there = absolute(source), absolute(destination)
    if here == there:
        raise InputError(f"{destination}: source and destination are the same folder")
    if here in there.parents:
        raise InputError(f"{destination}: lies inside the source folder {source}")
    if there in here.parents:
        raise InputError(f"{destination}: contains the source {source}")
    if destination.exists() and not destination.is_dir():
        raise InputError(f"{destination}: is a file; expected a folder to write")
    if destination.is_dir() and any(destination.iterdir()):
        if not force:
            raise InputError(f"{destination}: not empty; --force replaces the checkpoint there")
        if not (destination / "config.json").exists():
            raise InputError(
                f"{destination}: not a checkpoint, and --force replaces only "
                "checkpoints; name another folder"
            )


def _write(
    source: Checkpoint, dtype: np.dtype | None, format: str, folder: Path, bar: ProgressBar
) -> Converted:
    """Writes the weights; see `convert`."""
    from wedlm_jax.checkpoint.model import stored_parameters
    from wedlm_jax.checkpoint.names import stored_tensors
    from wedlm_jax.checkpoint.orbax import write_arrays

    def reporting(array: DeferredArray) -> DeferredArray:
        def read() -> np.ndarray:
            bar.advance()
            return array.read()

        return dataclasses.replace(array, read=read)

    stored = stored_parameters if format == ORBAX else stored_tensors
    arrays = [reporting(array) for array in stored(source, dtype)]
    bar.update(0, total=len(arrays))
    if format == ORBAX:
        write_arrays(folder / ORBAX, arrays)
    else:
        write_weights(arrays, folder)
    dtypes = sorted({array.dtype.name for array in arrays})
    return Converted(format, len(arrays), sum(array.nbytes for array in arrays), tuple(dtypes))
