"""Finds the folder of the model that a user names."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from wedlm_jax.checkpoint.convert import convert
from wedlm_jax.checkpoint.hf_folder import EMBEDDED_MODEL
from wedlm_jax.checkpoint.model_folder import what_file
from wedlm_jax.checkpoint.packaged import PACKAGED, may_be_of_hub, packaged_file
from wedlm_jax.errors import InputError, StorageFailure, file_error, nearest
from wedlm_jax.host.atomic import alone
from wedlm_jax.host.notices import notice
from wedlm_jax.host.storage import cache_folder

CONVERSION = 1
"""Raised when conversion makes something else of the same GGUF file."""


def find_model(model: str | Path | None) -> Path:
    """Returns the folder of a checkpoint: given, the embedded one, a packaged one, or fetched from
    the hub.

    Raises:
      InputError: it is neither a folder nor a model of the hub that may be had, or its package is
        not installed.
      StorageFailure: the hub, or the disk that its files go to, refuses or does not answer.
    """
    if model is None:
        if not EMBEDDED_MODEL.is_dir():
            raise InputError("no model is embedded in this installation; name a checkpoint folder")
        return EMBEDDED_MODEL
    folder = Path(packaged(model))
    if folder.is_file():
        raise InputError(f"{folder}: {what_file(folder)}")
    if not folder.exists() and (near := nearest(str(folder), PACKAGED)) and "/" not in str(folder):
        raise InputError(f"{model}: no such folder; did you mean {near!r}?")
    if folder.exists() or not may_be_of_hub(str(model)):
        return folder
    from huggingface_hub import errors, snapshot_download

    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=wanted))
    except Exception as error:
        # The hub's client raises many types; to a user all mean: not a folder, not fetched.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        lasting = (
            errors.RepositoryNotFoundError,  # private and gated ones among them
            errors.HFValidationError,
            errors.OfflineModeIsEnabled,
            errors.EntryNotFoundError,
        )
        unreachable = isinstance(error, errors.LocalEntryNotFoundError)
        kind = InputError if isinstance(error, lasting) and not unreachable else StorageFailure
        raise kind(
            f"{model!r} is not a folder here and could not be fetched from the hub ({reason})"
        ) from None


def packaged(model: str | Path) -> str:
    """Returns the folder of a model in `PACKAGED`, which is made the first time; another name, and
    that of a folder here, as it is.

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
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of processes that start together one makes it, and the others wait.
        with alone(folder.parent):
            if not (folder / "config.json").exists():
                notice("unpacking %s into %s, once", name, folder)
                convert(file, folder)
    except OSError as error:
        raise file_error(folder, "cannot be written", error) from None
    return str(folder)
