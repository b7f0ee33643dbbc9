"""Checks before a run's first step that all hosts have the same recipe, data, package versions and
states.

Hosts that differ would silently train with, say, different learning rates, or hang because their
programs differ. So each host computes a digest of all this; if the digests differ, all hosts report
the differences and end. No device is involved: with different versions it might not answer.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import train
import wedlm_jax
from train.data.sources import manifest_of
from train.recipe.config import TrainConfig, field_values
from train.recipe.phases import source_names
from wedlm_jax.checkpoint import RUN_STATES
from wedlm_jax.checkpoint.orbax import is_whole, whole_steps
from wedlm_jax.errors import InputError, shortened
from wedlm_jax.host.processes import SEEN_WITHIN_S, coordinator
from wedlm_jax.host.storage import (
    as_path,
    file_sizes,
    folder_of_this_machine,
    is_remote,
    sampled,
    source_digest,
)

PACKAGES = ("jax", "jaxlib", "libtpu", "flax", "optax", "orbax-checkpoint")
STATE, START = "the newest whole state", "what model.init_from holds"
SAMPLES = 3
"""Pieces that are compared of each file of a starting checkpoint."""


def agree(config: TrainConfig, *, allow_changed: bool = False) -> list[int]:
    """Checks that all hosts have the same recipe, data, versions and newest state, and returns the
    steps of the run's states, newest first, as process 0 lists them. All hosts call this.

    Hosts look for the newest state until all see the same one, or `SEEN_WITHIN_S` has passed, since
    some file systems are slow to show what another host has written or renamed.

    Raises:
      InputError: hosts differ, or data cannot be read. In the first case all hosts raise it, and
        the message names what differs, the values and the hosts.
    """
    folder, service = as_path(config.output) / RUN_STATES, coordinator()
    states = whole_steps(folder)
    if service is None:
        return states[::-1]
    mine = described(config) | {"--allow-changed": str(allow_changed)}
    deadline = time.monotonic() + SEEN_WITHIN_S
    while True:
        mine |= {STATE: str(states[-1] if states else None), START: _start(config, states)}
        digest = hashlib.sha256(json.dumps(mine, sort_keys=True).encode()).hexdigest()
        if len(set(service.texts(digest))) == 1:
            return list(json.loads(service.texts(json.dumps(states[::-1]))[0]))
        late, first = time.monotonic() > deadline, service.index == 0
        theirs, late = json.loads(service.texts(json.dumps([mine, late]) if first else "")[0])
        found = [json.loads(text) for text in service.texts(json.dumps(_others(theirs, mine)))]
        differing = {name for one in found for name in one}
        if late or STATE not in differing or differing - {STATE, START}:
            raise InputError(differences(theirs, found))
        time.sleep(0.5)
        newest = {one.get(STATE, theirs[STATE]) for one in found} - {"None"}
        # Also looked up by name: a listing may be cached although a lookup by name is not.
        named = [step for step in map(int, newest) if is_whole(folder / str(step))]
        states = sorted({*whole_steps(folder), *named})


def described(config: TrainConfig) -> dict[str, str]:
    """Returns what this host would run, by name: each field of the recipe, the version of each
    package, and digests of the data."""
    fields = field_values(dataclasses.asdict(config))
    # Hosts may have different names for one folder; `train.run_files.open_output` checks it.
    found = {name: json.dumps(value) for name, value in fields.items() if name != "output"}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    # Clones of one version may be at different commits.
    sources = source_digest(wedlm_jax, train)[:12]
    found["wedlm_jax"] = f"{wedlm_jax.__version__} with sources {sources}"
    found["Python"] = ".".join(platform.python_version_tuple()[:2])
    places = [(name, "data.sources") for name in source_names(config) if name]
    if config.evaluation.every:
        if config.evaluation.source:
            places.append((config.evaluation.source, "evaluation.source"))
        if config.evaluation.questions:
            questions = folder_of_this_machine(config.evaluation.questions, "evaluation.questions")
            found["what evaluation.questions holds"] = _content(questions)
    for name, field in places:
        manifest = manifest_of(name, field)
        found[f"what {name} holds"] = f"{manifest.rows:,} rows ({manifest.content[:16]})"
    if config.data.tokenizer is not None:
        path = as_path(config.data.tokenizer) / "tokenizer.json"
        found["what data.tokenizer holds"] = _content(path)
    return found


def differences(first: Mapping[str, str], others: Sequence[Mapping[str, str]]) -> str:
    """Describes what differs between hosts.

    Args:
      first: what host 0 runs, by name.
      others: what each host, host 0 included, has that differs from ``first``.
    """
    parts = []
    for name in dict.fromkeys(name for found in others for name in found):
        hosts: dict[str, list[int]] = {}
        for index, found in enumerate(others):
            hosts.setdefault(found.get(name, first.get(name, "absent")), []).append(index)
        values = [f"{shortened(value, 100)} on {_hosts(which)}" for value, which in hosts.items()]
        parts.append(f"{name} is {', '.join(values[:-1])} and {values[-1]}")
    more = f"; and {len(parts) - 8} more" if len(parts) > 8 else ""
    return f"the {len(others)} hosts of this run differ: {'; '.join(parts[:8])}{more}"


def _hosts(which: Sequence[int]) -> str:
    named = ", ".join(map(str, which[:4])) + (f" and {len(which) - 4} more" if which[4:] else "")
    return f"host {named}" if len(which) == 1 else f"hosts {named}"


def _others(first: Mapping[str, str], mine: Mapping[str, str]) -> dict[str, str]:
    """Returns what this host has that differs from host 0."""
    names = dict.fromkeys([*first, *mine])
    return {name: mine.get(name, "absent") for name in names if first.get(name) != mine.get(name)}


def _start(config: TrainConfig, states: Sequence[int]) -> str:
    """Describes the files of the checkpoint that a run without states starts from: names, sizes
    and samples of their content."""
    if states or config.branch_from is not None:
        return "not checked"
    given = config.model.init_from, config.drafter.init_from
    folders = [as_path(name) for name in given if name is not None]
    if not folders or any(map(is_remote, folders)):
        return "not checked"
    digest = hashlib.sha256()
    files = {
        (folder, name): size
        for folder in folders
        for name, size in sorted(file_sizes(folder).items())
        if name.endswith((".json", ".safetensors")) or name.startswith("orbax/")
    }
    for (folder, name), size in files.items():
        digest.update(f"{name} {size}\n".encode())
        for piece in sampled(folder / name, SAMPLES):
            digest.update(piece)
    return f"{len(files)} files of {sum(files.values()):,} bytes ({digest.hexdigest()[:16]})"


def _content(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        return f"unreadable ({error.strerror})"
