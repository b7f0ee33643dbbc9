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


def imported(file):
    """Top-level names of the packages that a file imports, anywhere in it."""
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize(
    ("package", "others"),
    [
        ("wedlm_jax", {"train", "infer", "benchmarks"}),
        ("train", {"infer", "benchmarks"}),
        ("infer", {"train", "benchmarks"}),
    ],
)
def test_packages_do_not_import_each_other(package, others):
    files = [file for file in (ROOT / package).rglob("*.py") if file != COMMAND]
    assert len(files) > 20
    wrong = {str(file.relative_to(ROOT)): others & set(imported(file)) for file in files}
    assert {file: names for file, names in wrong.items() if names} == {}


@cache
def imported_files(file):
    """The project's files that a file imports by name, anywhere in it."""
    return set(_imported_files(file))


def _imported_files(file):
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                module = ROOT.joinpath(*node.module.split("."))
                files = (f"{module}/{alias.name}.py", f"{module}.py", f"{module}/__init__.py")
                yield from [path for path in map(Path, files) if path.is_file()][:1]
        elif isinstance(node, ast.Import):
            for alias in node.names:
                path = Path(f"{ROOT.joinpath(*alias.name.split('.'))}.py")
                yield from [path] if path.is_file() else []


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


def test_what_a_forward_does_knows_nothing_of_who_decodes_when():
    engine = ROOT / "wedlm_jax" / "engine"
    files = (ROOT / "wedlm_jax" / "decode").glob("*.py")
    assert [
        file.name for file in files if any(engine in f.parents for f in imported_files(file))
    ] == []


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
