"""`generation_config.json`: what ends a checkpoint's texts, and the sampling its makers advise."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wedlm_jax.errors import InputError, shortened
from wedlm_jax.params import SamplingParams

FILE = "generation_config.json"

ALWAYS = ("repetition_penalty",)
SAMPLED = ("temperature", "top_p", "top_k", "min_p")
"""Fields of `SamplingParams` with these names there; the latter count only with ``do_sample``."""


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """Holds what is read of a `generation_config.json`.

    Attributes:
      path: of the file, for messages.
      eos_token_ids: what ends a text, besides what ``config.json`` says.
      advised: fields of `SamplingParams` as the file has them, not checked.
    """

    path: Path
    eos_token_ids: tuple[int, ...] = ()
    advised: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def samples(self) -> bool:
        """Whether the file advises to sample, instead of the most likely tokens."""
        return bool(self.advised.get("temperature"))

    def params(self) -> SamplingParams:
        """Returns the sampling that the file advises.

        Raises:
          InputError: a value is none that the field may have.
        """
        try:
            return SamplingParams(**self.advised)
        except InputError as error:
            raise InputError(f"{self.path}: {error}") from None


def read_generation_config(folder: Path) -> GenerationConfig:
    """Reads the file of a checkpoint; without one, nothing is advised.

    Raises:
      InputError: it is no JSON object, or its stop tokens are no token ids.
    """
    path = folder / FILE
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return GenerationConfig(path)
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(raw, dict):
        raise InputError(f"{path}: expected a JSON object")
    given = raw.get("eos_token_id")
    ends = [] if given is None else given if isinstance(given, list) else [given]
    if not all(type(one) is int and one >= 0 for one in ends):
        shown = shortened(json.dumps(given), 60)
        raise InputError(f"{path}: expected a token id, or a list, as eos_token_id, not {shown}")
    do_sample = raw.get("do_sample")
    if do_sample not in (None, True, False):
        raise InputError(f"{path}: expected true or false as do_sample, not {do_sample!r}")
    names = (*SAMPLED, *ALWAYS) if do_sample else ALWAYS
    advised = {name: raw[name] for name in names if raw.get(name) is not None}
    if do_sample:
        advised = {"temperature": 1.0} | advised  # what transformers takes
    return GenerationConfig(path, tuple(dict.fromkeys(ends)), advised)


def write_ends(folder: Path, eos_token_ids: Sequence[int]) -> None:
    """Puts a model's stop tokens into the file, if there is one: programs that read it do not look
    for them in ``config.json``."""
    path = folder / FILE
    if not path.exists() or not eos_token_ids:
        return
    read_generation_config(folder)  # whoever copied it learns what is wrong with it
    raw = json.loads(path.read_text(encoding="utf-8"))
    ends = list(eos_token_ids)
    raw["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    path.write_text(json.dumps(raw, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
