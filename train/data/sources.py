"""Opens the folders that a recipe trains on, checks them against it, and counts epochs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer

from train.data.batches import streams_of
from train.data.shards import Manifest, ShardRows, read_manifest, tokenizer_fingerprint
from train.recipe.config import TrainConfig
from train.recipe.phases import Phase, phases_of
from train.recipe.skipped_batches import SkippedBatches
from train.watch.records import Record
from wedlm_jax.errors import InputError, counted
from wedlm_jax.host.processes import say
from wedlm_jax.host.storage import folder_of_this_machine


def open_sources(
    config: TrainConfig, tokenizer: Tokenizer, pad_token_id: int
) -> list[list[tuple[ShardRows, float]]]:
    """Opens ``data.sources`` of all phases of a recipe, and prints what each contains; rows are not
    read yet. Returns the rows of each folder and their weight, phase by phase.

    Raises:
      InputError: as `open_folder`; or a phase has fewer rows than one of its batches takes.
    """
    opened, told = [], []
    for phase in phases_of(config):
        own, sets = phase.config, []
        total = sum(own.data.sources.values())
        for name, weight in own.data.sources.items():
            rows = open_folder(name, own, tokenizer, pad_token_id)
            sets.append((rows, weight))
            told.append(
                f"{name}: {weight / total:.1%} of the rows; {counted(len(rows), 'row')}, "
                f"{rows.manifest.tokens:,} tokens, {rows.manifest.fill:.1%} filled"
            )
        count, batch = sum(len(rows) for rows, _ in sets), own.rows * own.accumulation
        if count < batch:
            raise InputError(
                f"data.sources: a step takes {counted(batch, 'packed row')} (rows x accumulation), "
                f"but the data has {count:,}; lower rows or accumulation, or add data"
            )
        opened.append(sets)
    for line in dict.fromkeys(told):  # phases may share folders
        say(line)
    return opened


def manifest_of(name: str, field: str = "data.sources") -> Manifest:
    """Returns the manifest of a folder that a recipe's ``field`` names.

    Raises:
      InputError: the folder is in a bucket, or has no manifest.
    """
    return read_manifest(folder_of_this_machine(name, field))


def open_folder(
    name: str, config: TrainConfig, tokenizer: Tokenizer, pad_token_id: int
) -> ShardRows:
    """Opens a folder of packed rows.

    Raises:
      InputError: it is not such a folder, or its row length, block size or tokenizer is not the
        recipe's.
    """
    folder = folder_of_this_machine(name, "data.sources")
    manifest, fingerprint = read_manifest(folder), tokenizer_fingerprint(tokenizer)
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
    return ShardRows(folder, manifest, pad_token_id)


MANY = 4.0
"""Up to about this many epochs, repeated rows are worth nearly as much as new ones (Muennighoff et
al., arXiv 2305.16264, section 6)."""


class Epochs:
    """Counts the epochs of each source of a run, the rows of skipped batches included.

    Args:
      phases: phases of the recipe.
      rows: number of rows of each source, by its name in the recipe.
    """

    def __init__(self, phases: Sequence[Phase], rows: Mapping[str, int]):
        self._phases, self._rows = list(zip(phases, streams_of(phases), strict=True)), rows
        self._skipped = SkippedBatches.of(phases[0].config.data.skip)

    def after(self, step: int) -> dict[str, float]:
        """Returns the epochs of each source in the first ``step`` steps, to within a row or two."""
        read = dict.fromkeys(self._rows, 0.0)
        for phase, streams in self._phases:
            if phase.first >= step:
                break
            batches = self._skipped.between(phase.first, min(step, phase.stop))
            rows = batches * phase.config.accumulation * phase.config.rows
            sources = phase.config.data.sources
            for (name, weight), stream in zip(sources.items(), streams, strict=True):
                read[name] = stream.taken + rows * weight / sum(sources.values())
        return {name: count / self._rows[name] for name, count in read.items()}

    def record(self, step: int) -> Record:
        """Returns `after` under the names of metrics."""
        return {f"epoch/{name}": round(epochs, 4) for name, epochs in self.after(step).items()}

    def lines(self, done: int) -> list[str]:
        """Returns messages about how often a run with ``done`` completed steps reads each source,
        and warnings where that is often."""
        whole, now = self.after(self._phases[-1][0].stop), self.after(done)
        lines = []
        for name, epochs in whole.items():
            lines.append(
                f"{name}: {epochs:.2f} epochs of {counted(self._rows[name], 'row')} "
                f"in the whole run, {now[name]:.2f} done"
            )
            if epochs > MANY:
                lines.append(
                    f"warning: {name}: more than {MANY:g} epochs, after which repeated rows teach "
                    "less and less; more rows, a smaller share or fewer steps would help"
                )
        return lines
