"""The checked settings of an engine, from what a user asks for and what fits the platform."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection
from typing import Any

from wedlm_jax.attention.ragged import check_ragged_backend
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.forward import Program
from wedlm_jax.decode.loop import REFILLS
from wedlm_jax.decode.options import Traits
from wedlm_jax.decode.sizes import forward_sizes
from wedlm_jax.decode.state import num_slots
from wedlm_jax.decode.vocabulary import Vocabulary
from wedlm_jax.engine.memory import MemoryPlan, plan_pages, working_bytes
from wedlm_jax.errors import InputError
from wedlm_jax.model.layers import columns_are_faster
from wedlm_jax.params import SamplingParams

PAGE_SIZES = {"cpu": 16, "gpu": 32, "tpu": 128}
CHUNK_TOKENS = {"cpu": 256, "gpu": 512, "tpu": 1024}
"""Prompt tokens that a forward computes beside the windows: as many as hardly slow it down."""
BALANCED_TOKENS = {"cpu": 32, "gpu": 512, "tpu": 512}
"""Tokens of a forward that takes about twice as long as that of one token: about twice as many as
the device computes while it reads the weights."""
TOKENS_AT_ONCE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""The most tokens that pass the layers at once. More would not be cheaper per token; larger
forwards are computed in parts of this size, with little padding."""
MOST_LOOKUP = 15
"""Drafts that are copied from a text, at most: with the last token of the text a forward of 16."""
EMITTED = 256
"""Tokens that a sequence may commit before the host fetches them."""


@dataclasses.dataclass(frozen=True)
class SchedulerSizes:
    """The sizes that the device was made for.

    Attributes:
      num_replicas: R.
      num_sequences: N, of each replica.
      num_pages: of each replica's cache, the trash page included.
      page_size: tokens a page holds.
      max_pages: columns of the page table: pages that one sequence can have.
      chunk_tokens: prompt tokens that a forward of a replica may compute beside windows.
      balanced_tokens: tokens of a forward that takes about twice as long as that of one token.
      max_model_len: the most tokens of a prompt and its completion together.
      longest_burst: forwards of a burst while no sequence waits.
    """

    num_replicas: int
    num_sequences: int
    num_pages: int
    page_size: int
    max_pages: int
    chunk_tokens: int
    max_model_len: int
    balanced_tokens: int = 16
    longest_burst: int = 64


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine; `wedlm_jax.engine.engine.Engine` says what they mean to a user.

    Attributes:
      replicas: R, of the mesh's ``data`` axis.
      sequences_each: N, the most sequences that a replica decodes together.
      window: W, the widest window of the engine.
      lookup: the most drafts that are copied from a text; 0 for none.
      max_text: the most tokens of a prompt and its completion together.
      emitted: E, tokens that a sequence may commit in a burst.
      page_size: tokens of a page.
      num_pages: of a replica, the trash page included.
      max_pages: of one sequence.
      cache_dtype: of keys and values.
      chunk_tokens: the most prompt tokens that a forward computes beside windows.
      balanced_tokens: tokens of a forward that takes about twice as long as that of one token.
      tokens_at_once: the most tokens that pass the layers at once.
      coarse_sizes: whether forwards are compiled at few sizes, far apart.
      whole_tokens: computed together by a CPU's matrix product; see `forward_sizes`.
      compiler_lays_out: whether the compiler chooses how parameters lie in memory.
      attention: a name in `wedlm_jax.attention.RAGGED_BACKENDS`.
      refill: "streaming" or "blockwise".
      deterministic: whether every forward of every program has the same shape.
      eos_token_ids: of the model.
      vocabulary: the tokens that may be chosen.
    """

    replicas: int
    sequences_each: int
    window: int
    lookup: int
    max_text: int
    emitted: int
    page_size: int
    num_pages: int
    max_pages: int
    cache_dtype: Any
    chunk_tokens: int
    balanced_tokens: int
    tokens_at_once: int
    coarse_sizes: bool
    whole_tokens: int
    compiler_lays_out: bool
    attention: str
    refill: str
    deterministic: bool
    eos_token_ids: tuple[int, ...]
    vocabulary: Vocabulary

    @property
    def sequences(self) -> int:
        """All sequences that decode together, over all replicas."""
        return self.replicas * self.sequences_each

    @property
    def total_tokens(self) -> int:
        """The most tokens of a forward of one replica."""
        return self.sequences_each * num_slots(self.window, self.lookup) + self.chunk_tokens

    @property
    def scheduler_sizes(self) -> SchedulerSizes:
        """What a scheduler has to know of them."""
        return SchedulerSizes(
            num_replicas=self.replicas,
            num_sequences=self.sequences_each,
            num_pages=self.num_pages,
            page_size=self.page_size,
            max_pages=self.max_pages,
            chunk_tokens=self.chunk_tokens,
            max_model_len=self.max_text,
            balanced_tokens=self.balanced_tokens,
        )

    def program(self, traits: Traits) -> Program:
        """Returns what a burst of sequences with these traits is compiled for.

        The size of a deterministic engine is that of its own window: not of whoever is there, since
        a sequence must not notice who is. A program for everything has few sizes: it is to be
        compiled soon, and to serve until a better one is there.
        """
        alike = self.deterministic
        sizes = forward_sizes(
            self.sequences_each,
            self.window if alike else traits.window,
            self.chunk_tokens,
            self.tokens_at_once,
            coarse=self.coarse_sizes or (traits.are_everything and not alike),
            narrower=traits.autoregressive and not alike,
            one_size=alike,
            whole=self.whole_tokens,
            lookup=traits.lookup,
        )
        return Program(sizes, traits, self.attention, self.vocabulary, self.refill)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Returns the tokens that end a completion."""
        ends = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*ends, *params.stop_token_ids)))


@dataclasses.dataclass(frozen=True)
class Wishes:
    """Holds what a user asks of an engine; see `wedlm_jax.engine.engine.Engine`.

    Attributes:
      window: W, the widest.
      lookup: the most drafts that are copied from a text.
      page_size, num_pages, chunk_tokens: None for what fits platform and memory.
    """

    window: int
    max_batch_size: int = 16
    refill: str = "streaming"
    max_model_len: int | None = None
    attention: str | None = None
    kv_cache_dtype: str | None = None
    deterministic: bool = False
    page_size: int | None = None
    num_pages: int | None = None
    chunk_tokens: int | None = None
    known_tokens: Collection[int] | None = None
    lookup: int = 0


def plan_engine(
    config: ModelConfig,
    wishes: Wishes,
    *,
    dtype: Any,
    platform: str,
    replicas: int,
    weights: int,
    limit: int | None = None,
) -> tuple[EngineSettings, MemoryPlan]:
    """Works out the settings, under the current mesh.

    Args:
      config: of the model.
      dtype: of its parameters.
      platform: of the devices, as JAX names it.
      replicas: of the mesh's ``data`` axis.
      weights: bytes of the parameters on one device.
      limit: bytes of a device; by default what it reports.

    Raises:
      InputError: naming the option that does not fit.
    """
    if wishes.window:
        config.require_mask_token_id()
    if wishes.refill not in REFILLS:
        raise InputError(f"refill: expected one of {', '.join(REFILLS)}, not {wishes.refill!r}")
    if wishes.kv_cache_dtype not in (None, "int8"):
        raise InputError(f"kv_cache_dtype: expected None or 'int8', not {wishes.kv_cache_dtype!r}")
    _check_count("lookup", wishes.lookup, least=0)
    if wishes.lookup > MOST_LOOKUP:
        raise InputError(f"lookup: expected at most {MOST_LOOKUP}, not {wishes.lookup}")
    for name in ("max_batch_size", "page_size", "chunk_tokens"):
        _check_count(name, getattr(wishes, name), least=1)
    _check_count("num_pages", wishes.num_pages, least=2)
    attention = check_ragged_backend(
        wishes.attention, platform, config, int8=wishes.kv_cache_dtype is not None
    )
    length = _checked_length(wishes.max_model_len, config)
    page_size = wishes.page_size or _of(PAGE_SIZES, platform)
    slots = num_slots(wishes.window, wishes.lookup)
    max_pages = math.ceil((length + slots + 1) / page_size)
    cache_dtype = wishes.kv_cache_dtype or dtype
    settings = EngineSettings(
        replicas=replicas,
        sequences_each=wishes.max_batch_size,
        window=wishes.window,
        lookup=wishes.lookup,
        max_text=length,
        emitted=max(EMITTED, 2 * slots),
        page_size=page_size,
        num_pages=wishes.num_pages or 0,
        max_pages=max_pages,
        cache_dtype=cache_dtype,
        chunk_tokens=wishes.chunk_tokens or _of(CHUNK_TOKENS, platform),
        balanced_tokens=_of(BALANCED_TOKENS, platform),
        tokens_at_once=_of(TOKENS_AT_ONCE, platform),
        coarse_sizes=platform != "cpu",
        whole_tokens=16 if columns_are_faster(config, dtype) else 4,
        compiler_lays_out=platform == "tpu",
        attention=attention,
        refill=wishes.refill,
        deterministic=wishes.deterministic,
        eos_token_ids=tuple(config.eos_token_ids),
        vocabulary=Vocabulary.of(config, wishes.known_tokens),
    )
    memory = plan_pages(
        config,
        platform=platform,
        weights=weights,
        working=working_bytes(config, settings.tokens_at_once, settings.total_tokens, dtype),
        page_size=page_size,
        pages_per_sequence=max_pages,
        sequences=wishes.max_batch_size,
        dtype=cache_dtype,
        num_pages=wishes.num_pages,
        limit=limit,
    )
    return dataclasses.replace(settings, num_pages=memory.num_pages), memory


def _of(table: dict[str, int], platform: str) -> int:
    return table.get(platform, table["gpu"])


def _check_count(name: str, value: object, *, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{name}: expected {least} or more, not {value!r}")


def _checked_length(length: int | None, config: ModelConfig) -> int:
    limit = config.max_position_embeddings
    length = limit if length is None else length
    if not 1 <= length <= limit:
        raise InputError(
            f"max_model_len: expected 1 to {limit}, the model's context, not {length!r}"
        )
    return length
