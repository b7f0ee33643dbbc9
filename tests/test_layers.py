"""Who imports whom: the library knows neither job, and the jobs not each other."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMAND = ROOT / "wedlm_jax" / "__main__.py"
"""The one file that knows all."""


def imported(file: Path) -> Iterator[str]:
    """Top-level names of the packages that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize(
    ("package", "others"),
    [("wedlm_jax", {"train", "infer"}), ("train", {"infer"}), ("infer", {"train"})],
)
def test_packages_do_not_import_each_other(package: str, others: set[str]) -> None:
    files = [file for file in (ROOT / package).rglob("*.py") if file != COMMAND]
    assert len(files) > 20
    wrong = {str(file.relative_to(ROOT)): others & set(imported(file)) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}
