"""Who imports whom, how large files may be, and that each has tests."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("wedlm_jax", "train", "infer")
"""What the wheel has."""
FOLDERS = (*PACKAGES, "benchmarks")
COMMAND = ROOT / "wedlm_jax" / "__main__.py"
"""The one file that knows all."""


@cache
def tree_of(file):
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imported_files(file):
    """The project's files that a file imports, anywhere in it."""
    package, found = file.relative_to(ROOT).parts[0], set()
    for node in ast.walk(tree_of(file)):
        names = []
        if isinstance(node, ast.ImportFrom):
            names = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):  # of its own package only for where that lies
            names = [(alias.name,) for alias in node.names if alias.name != package]
        for modules in names:  # a module, or what one has
            paths = [ROOT.joinpath(*str(module).split(".")) for module in modules]
            files = [one for path in paths for one in (Path(f"{path}.py"), path / "__init__.py")]
            found.update([one for one in files if one.is_file()][:1])
    return found


@pytest.mark.parametrize(
    ("folder", "others"),
    [
        ("wedlm_jax", ["train", "infer", "benchmarks"]),
        ("train", ["infer", "benchmarks"]),
        ("infer", ["train", "benchmarks"]),
        # What a forward does knows nothing of who decodes when.
        ("wedlm_jax/decode", ["wedlm_jax/engine"]),
    ],
)
def test_folders_do_not_import_each_other(folder, others):
    files = [file for file in (ROOT / folder).rglob("*.py") if file != COMMAND]
    assert len(files) > 10
    wrong = [
        f"{file.relative_to(ROOT)} imports {other.relative_to(ROOT)}"
        for file in files
        for other in imported_files(file)
        if any(other.is_relative_to(ROOT / name) for name in others)
    ]
    assert wrong == []


def test_no_circle_of_imports():
    """Counts imports under `TYPE_CHECKING` and inside functions, too."""
    files = [file for package in FOLDERS for file in (ROOT / package).rglob("*.py")]
    graph = {file: imported_files(file) for file in files}

    def reached(start):
        found, todo = set(), [start]
        while todo:
            for file in graph.get(todo.pop(), set()) - found:
                found.add(file)
                todo.append(file)
        return found

    assert len(files) > 100
    assert [str(file.relative_to(ROOT)) for file in files if file in reached(file)] == []


def test_files_are_small():
    files = [file for name in (*FOLDERS, "tests") for file in (ROOT / name).rglob("*.py")]
    long = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert {str(file.relative_to(ROOT)): n for file, n in long.items() if n > 600} == {}


def test_every_module_has_tests():
    """One of its name, one that imports it or what it is a part of in its folder, or one that its
    docstring names."""
    files = [file for package in FOLDERS for file in (ROOT / package).rglob("*.py")]
    modules = {file for file in files if file.name != "__init__.py" and file != COMMAND}
    tests = ROOT / "tests"
    found = {file for test in tests.rglob("*.py") for file in imported_files(test)}
    for file in modules:
        own = tests / file.relative_to(ROOT).with_name(f"test_{file.name}")
        named = re.search(r"tests/[\w/]+\.py", docstring(file))
        if own.exists() or (named and (ROOT / named[0]).exists()):
            found.add(file)
    todo = list(found.intersection(files))
    while todo:
        whole = todo.pop()
        parts = {file for file in imported_files(whole) if file.parent == whole.parent} - found
        found |= parts
        todo += parts
    assert sorted(str(file.relative_to(ROOT)) for file in modules - found) == []


def docstring(file):
    return ast.get_docstring(tree_of(file)) or ""
