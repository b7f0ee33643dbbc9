"""The folders that a recipe trains on, checked against the recipe and mixed by weight."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tokenizers import Tokenizer

from train.data.manifest import Manifest, read_manifest, tokenizer_fingerprint
from train.data.order import check_rows
from train.data.shards import ShardRows
from train.recipe.config import TrainConfig
from train.recipe.phases import phases_of
from wedlm_jax.errors import InputError
from wedlm_jax.host.processes import say
from wedlm_jax.host.storage import folder_of_this_machine


@dataclasses.dataclass(frozen=True)
class Sources:
    """Holds opened folders of packed rows and their weights."""

    rows: list[ShardRows]
    manifests: list[Manifest]
    weights: list[float]

    def row_sets(self) -> list[tuple[ShardRows, float]]:
        return list(zip(self.rows, self.weights, strict=True))


def open_sources(config: TrainConfig, tokenizer: Tokenizer, pad_token_id: int) -> Sources:
    """Opens ``data.sources`` of a recipe.

    Args:
      config: the recipe.
      tokenizer: the model's.
      pad_token_id: what padding holds.

    Raises:
      InputError: a folder that is none of packed rows, or of rows with another length, block
        size or tokenizer than the recipe's.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    sources = Sources([], [], [])
    for name, weight in config.data.sources.items():
        folder = folder_of_this_machine(name, "data.sources")
        manifest = _fitting_manifest(folder, config, fingerprint)
        sources.manifests.append(manifest)
        sources.rows.append(ShardRows(folder, manifest, pad_token_id))
        sources.weights.append(weight)
    return sources


def check_sources(config: TrainConfig, tokenizer: Tokenizer) -> None:
    """Refuses folders, of all phases and of the evaluation, that `open_sources` would refuse, or
    that hold too few rows, and says what each holds that is trained on; reads their manifests
    alone.

    Raises:
      InputError: as `open_sources` and `train.data.order.check_rows`.
    """
    fingerprint = tokenizer_fingerprint(tokenizer)
    told = []
    for phase in phases_of(config):
        own, sets = phase.config, []
        total = sum(own.data.sources.values())
        for name, weight in own.data.sources.items():
            folder = folder_of_this_machine(name, "data.sources")
            manifest = _fitting_manifest(folder, own, fingerprint)
            sets.append((range(manifest.rows), weight))
            told.append(
                f"{folder}: {weight / total:.1%} of the rows; {manifest.rows:,} rows, "
                f"{manifest.tokens:,} tokens, {manifest.fill:.1%} filled"
            )
        if sets:
            check_rows(sets, own.rows * own.accumulation)
    if config.evaluation.every and config.evaluation.source is not None:
        folder = folder_of_this_machine(config.evaluation.source, "data.sources")
        _fitting_manifest(folder, config, fingerprint)
    for line in dict.fromkeys(told):  # phases may share folders
        say(line)


def _fitting_manifest(folder: Path, config: TrainConfig, fingerprint: str) -> Manifest:
    manifest = read_manifest(folder)
    for field in ("row_length", "block_size"):
        theirs, ours = getattr(manifest, field), getattr(config, field)
        if theirs != ours:
            flag = field.replace("_", "-")
            raise InputError(
                f"{folder}: tokenised with --{flag} {theirs}, but {field} is {ours} in the recipe; "
                f"set {field}={theirs}, or tokenise again"
            )
    if manifest.tokenizer != fingerprint:
        raise InputError(
            f"{folder}: made with another tokenizer "
            f"({manifest.tokenizer[:12]}) than the model's ({fingerprint[:12]})"
        )
    return manifest
