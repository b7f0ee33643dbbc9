"""Finds the folder of the model that a user names."""

from __future__ import annotations

from pathlib import Path

from wedlm_jax.checkpoint.hf_folder import EMBEDDED_MODEL
from wedlm_jax.errors import InputError, StorageFailure


def find_model(model: str | Path | None) -> Path:
    """Returns the folder of a checkpoint: given, the embedded one, or fetched from the hub.

    Raises:
      InputError: it is neither a folder nor a model of the hub that may be had.
      StorageFailure: the hub, or the disk that its files go to, refuses or does not answer.
    """
    if model is None:
        if not EMBEDDED_MODEL.is_dir():
            raise InputError("no model is embedded in this installation; name a checkpoint folder")
        return EMBEDDED_MODEL
    folder = Path(model)
    if folder.is_file():
        what = "a GGUF file, which is not read" if is_gguf(folder) else "a file"
        raise InputError(
            f"{folder}: is {what}; a model is a folder in Hugging Face format, with config.json "
            "and safetensors files"
        )
    if folder.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
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


def is_gguf(path: Path) -> bool:
    """Tells by its first bytes whether a file is one of llama.cpp's."""
    with path.open("rb") as file:
        return file.read(4) == b"GGUF"
