"""Plans an engine: checks the user's options, fills in what suits the platform, and computes how
many pages fit in memory alongside the weights and the largest compiled program."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Collection
from typing import Any

import jax

from wedlm_jax.attention.ragged import check_ragged_backend
from wedlm_jax.config import ModelConfig
from wedlm_jax.decode.backup import room_for
from wedlm_jax.decode.forward import Program
from wedlm_jax.decode.options import Traits, Vocabulary
from wedlm_jax.decode.spans import LARGEST_HEAD, forward_sizes
from wedlm_jax.decode.state import num_slots
from wedlm_jax.engine.config import EngineConfig
from wedlm_jax.errors import InputError
from wedlm_jax.model.layers import columns_are_faster
from wedlm_jax.params import SamplingParams
from wedlm_jax.sharding import shards

PAGE_SIZES = {"cpu": 16, "gpu": 32, "tpu": 128}
CHUNK_TOKENS = {"cpu": 256, "gpu": 512, "tpu": 1024}
"""Maximum prompt tokens that a forward computes in addition to windows: so few that they hardly
slow it down."""
BALANCED_TOKENS = {"cpu": 32, "gpu": 512, "tpu": 512}
"""The number of tokens at which a forward takes about twice as long as with a single token: about
twice as many as the device computes while it reads the weights."""
TOKENS_AT_ONCE = {"cpu": 256, "gpu": 1024, "tpu": 1024}
"""Maximum tokens that go through the layers at once. More would not be cheaper per token; larger
forwards are computed in parts of this size, with little padding."""
BACKUP_MASKS = {"cpu": 0, "gpu": 8, "tpu": 8}
"""The default number of backup masks. With few sequences, an accelerator spends a forward reading
the weights, so more tokens are nearly free; on a CPU each token costs time."""
EMITTED = 256
"""Minimum number of tokens per sequence that a burst has room to commit before the host fetches
them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerSizes:
    """The sizes of a device that its scheduler needs to know.

    Attributes:
      replicas: R, the size of the mesh's ``data`` axis.
      sequences_each: N, the maximum number of sequences that a replica decodes together.
      num_pages: pages of each replica's cache, the trash page included.
      page_size: tokens per page.
      max_pages: maximum pages of a sequence, which is the number of columns of the page table.
      chunk_tokens: maximum prompt tokens of a replica's forward, in addition to windows.
      max_text: maximum tokens of a prompt and its completion together.
      balanced_tokens: the number of tokens at which a forward takes about twice as long as with
        one token.
      longest_burst: maximum forwards of a burst while no sequence waits.
      backup_room: additional tokens for which a sequence with a window needs room in its pages if
        it has backup masks.
    """

    replicas: int
    sequences_each: int
    num_pages: int
    page_size: int
    max_pages: int
    chunk_tokens: int
    max_text: int
    balanced_tokens: int = 16
    longest_burst: int = 64
    backup_room: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings(SchedulerSizes):
    """The settings of an engine, derived from an `EngineConfig`.

    Attributes:
      window: W, the widest window of the engine.
      lookup: maximum number of drafts copied from a text; 0 for none.
      backup: maximum number of backup masks of a sequence; 0 for none.
      emitted: E, maximum tokens that a sequence may commit in a burst.
      cache_dtype: dtype of keys and values.
      tokens_at_once: maximum tokens that go through the layers at once.
      coarse_sizes: whether forwards are compiled at a few, widely spaced sizes.
      whole_tokens: how many tokens a CPU's matrix product computes together; see `forward_sizes`.
      compiler_lays_out: whether the compiler chooses the memory layouts of the parameters.
      attention: a name in `wedlm_jax.attention.RAGGED_BACKENDS`.
      deterministic: whether every forward of every program has the same shape.
      eos_token_ids: the model's end-of-text tokens.
      vocabulary: the tokens that may be chosen.
    """

    window: int
    lookup: int
    backup: int
    emitted: int
    cache_dtype: Any
    tokens_at_once: int
    coarse_sizes: bool
    whole_tokens: int
    compiler_lays_out: bool
    attention: str
    deterministic: bool
    eos_token_ids: tuple[int, ...]
    vocabulary: Vocabulary

    @property
    def sequences(self) -> int:
        """Maximum number of sequences that decode together, over all replicas."""
        return self.replicas * self.sequences_each

    @property
    def total_tokens(self) -> int:
        """Maximum tokens in a forward of one replica."""
        slots = num_slots(self.window, self.lookup) + self.backup
        return self.sequences_each * slots + self.chunk_tokens

    def program(self, traits: Traits) -> Program:
        """Returns the program for bursts of sequences with these traits.

        A deterministic engine runs all forwards at one size, which depends on the engine's window
        but not on the traits, so that a sequence's result does not depend on other sequences. A
        program for all kinds of requests has few sizes, since it must compile quickly; it is used
        until a better-fitting one is ready.
        """
        alike = self.deterministic
        backup = min(self.backup, traits.window) if traits.verified else 0
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
            backup=backup,
        )
        return Program(sizes, traits, self.attention, self.vocabulary, backup)

    def stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Returns the tokens that end a completion."""
        ends = () if params.ignore_eos else self.eos_token_ids
        return tuple(dict.fromkeys((*ends, *params.stop_token_ids)))


def plan_engine(
    model: ModelConfig,
    config: EngineConfig,
    *,
    window: int,
    lookup: int,
    known_tokens: Collection[int] | None,
    dtype: Any,
    platform: str,
    replicas: int,
    weights: int,
    limit: int | None = None,
) -> tuple[EngineSettings, MemoryPlan]:
    """Returns the engine's settings and its memory plan, for the current mesh.

    Args:
      model: the model's configuration.
      config: the user's options.
      window, lookup: the widest window of masks, and the maximum number of copied drafts.
      known_tokens: the ids that the model's tokenizer knows; None without a tokenizer.
      dtype: dtype of the model's parameters.
      platform: JAX's name of the devices' platform.
      replicas: size of the mesh's ``data`` axis.
      weights: bytes of the parameters on one device.
      limit: memory of a device in bytes; by default what it reports.

    Raises:
      InputError: an option does not fit the model or the device; the message names it.
    """
    if window and not model.knows_masks and model.mask_token_id is None:
        raise InputError(
            f"window_size: expected 0, not {config.window_size!r}: this model was not trained on "
            "masks; its drafts are copied from the text"
        )
    attention = check_ragged_backend(
        config.attention, platform, model, int8=config.kv_cache_dtype is not None
    )
    length = longest_text(config, model)
    page_size = config.page_size or _of(PAGE_SIZES, platform)
    slots = num_slots(window, lookup)
    backup = _of(BACKUP_MASKS, platform) if config.backup_masks is None else config.backup_masks
    backup = min(backup, window)
    backup_room = room_for(backup, page_size)
    max_pages = math.ceil((length + slots + 1 + backup_room) / page_size)
    cache_dtype = config.kv_cache_dtype or dtype
    settings = EngineSettings(
        replicas=replicas,
        sequences_each=config.max_batch_size,
        window=window,
        lookup=lookup,
        backup=backup,
        backup_room=backup_room,
        max_text=length,
        emitted=max(EMITTED, 2 * slots),
        page_size=page_size,
        num_pages=config.num_pages or 0,
        max_pages=max_pages,
        cache_dtype=cache_dtype,
        chunk_tokens=config.chunk_tokens or _of(CHUNK_TOKENS, platform),
        balanced_tokens=_of(BALANCED_TOKENS, platform),
        tokens_at_once=_of(TOKENS_AT_ONCE, platform),
        coarse_sizes=platform != "cpu",
        whole_tokens=16 if columns_are_faster(model, dtype) else 4,
        compiler_lays_out=platform == "tpu",
        attention=attention,
        deterministic=config.deterministic,
        eos_token_ids=tuple(model.eos_token_ids),
        vocabulary=Vocabulary.of(model, known_tokens),
    )
    memory = plan_pages(
        model,
        platform=platform,
        weights=weights,
        working=working_bytes(model, settings.tokens_at_once, settings.total_tokens, dtype),
        page_size=page_size,
        pages_per_sequence=max_pages,
        sequences=config.max_batch_size,
        dtype=cache_dtype,
        num_pages=config.num_pages,
        limit=limit,
    )
    return dataclasses.replace(settings, num_pages=memory.num_pages), memory


def _of(table: dict[str, int], platform: str) -> int:
    return table.get(platform, table["gpu"])


def longest_text(config: EngineConfig, model: ModelConfig) -> int:
    """Returns the maximum tokens of a prompt and its completion together. It needs no weights, so
    that what does not fit the model can be refused before they are loaded.

    Raises:
      InputError: ``max_model_len`` does not fit the model, or ``window_size`` such a text.
    """
    limit = model.max_position_embeddings
    length = limit if config.max_model_len is None else config.max_model_len
    if length > limit:
        raise InputError(
            f"max_model_len: expected 1 to {limit}, the model's context, not {length!r}"
        )
    window = config.window_size
    if isinstance(window, int) and window > length:
        raise InputError(
            f"window_size: expected at most {length}, the longest text (max_model_len), "
            f"not {window}"
        )
    return length


# --- Memory ----------------------------------------------------------------------------------

GIB = 2**30
USABLE = 0.95
"""Share of an accelerator's memory that is planned for; the rest allows for fragmentation."""
CPU_SHARE = 0.3
"""Share of the machine's memory that pages may take on a CPU, since other programs use it, too."""
SPARE = 1.5
"""Number of pages relative to what all sequences need at full length; the surplus caches
prefixes."""
CPU_TOKENS = 2048
"""Tokens per sequence for which pages are planned on a CPU, if the model's context is longer. Most
texts are shorter; if they are not, sequences wait for one another."""
MOST_SPARE = 4
"""Maximum number of pages on an accelerator, relative to the number that `SPARE` gives."""


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """The memory of each device, in bytes.

    Attributes:
      weights: this device's share of the model.
      pages: this device's share of the keys and values.
      working: what the largest compiled program needs in addition.
      limit: the device's memory; None if it is not known.
      num_pages: pages of each replica, the trash page included.
      page_size: tokens per page.
    """

    weights: int
    pages: int
    working: int
    limit: int | None
    num_pages: int
    page_size: int

    @property
    def cached_tokens(self) -> int:
        """Tokens that the pages of a replica hold."""
        return (self.num_pages - 1) * self.page_size

    def __str__(self) -> str:
        parts = (
            f"weights {self.weights / GIB:.2f}, pages {self.pages / GIB:.2f} for "
            f"{self.cached_tokens:,} tokens, working memory {self.working / GIB:.2f}"
        )
        limit = "" if self.limit is None else f" of {self.limit / GIB:.2f}"
        return f"{(self.weights + self.pages + self.working) / GIB:.2f} GiB{limit} ({parts})"


def bytes_per_page(config: ModelConfig, page_size: int, dtype: Any) -> int:
    """Returns the bytes of one page, over all layers, on one device of the current mesh."""
    heads = max(config.num_key_value_heads // shards("heads"), 1)
    numbers = config.num_hidden_layers * page_size * 2 * heads
    size = jax.numpy.dtype(dtype).itemsize
    scale = 4 if jax.numpy.dtype(dtype) == jax.numpy.int8 else 0
    return numbers * (config.head_dim * size + scale)


def working_bytes(config: ModelConfig, tokens: int, total: int, dtype: Any) -> int:
    """Estimates the bytes that a forward needs on one device besides weights and pages, from its
    large arrays: the activations of one layer, the hidden states of all tokens, and the head's
    logits.

    Args:
      tokens: maximum tokens that go through the layers at once.
      total: maximum tokens of a forward.
      dtype: dtype of the activations.
    """
    size, hidden = jax.numpy.dtype(dtype).itemsize, config.hidden_size
    width = 2 * config.intermediate_size + 3 * config.num_attention_heads * config.head_dim
    layer = tokens * (width // shards("heads") + 4 * hidden) * size
    logits = 4 * 4 * LARGEST_HEAD * config.vocab_size // shards("vocab")
    return layer + (total + tokens) * hidden * size + logits


def plan_pages(
    config: ModelConfig,
    *,
    weights: int,
    working: int,
    page_size: int,
    pages_per_sequence: int,
    sequences: int,
    dtype: Any,
    platform: str,
    num_pages: int | None = None,
    limit: int | None = None,
) -> MemoryPlan:
    """Plans the pages of a replica. On an accelerator they may take the memory that is left, up to
    a limit. On a CPU, whose memory other programs use, too, they take only what sequences of
    `CPU_TOKENS` need, or one sequence of full length.

    Args:
      weights, working: bytes already taken on a device.
      pages_per_sequence: pages of the longest sequence.
      sequences: N, the maximum number of sequences that decode together.
      dtype: dtype of keys and values.
      platform: JAX's name of the devices' platform.
      num_pages: the number requested; None for as many as fit.
      limit: memory of a device in bytes; by default what it reports.

    Raises:
      InputError: not even one sequence of full length fits; the message gives the numbers.
    """
    each = bytes_per_page(config, page_size, dtype)
    memory = device_memory() if limit is None else limit
    on_cpu = platform == "cpu"
    usual = min(pages_per_sequence, math.ceil(CPU_TOKENS / page_size) if on_cpu else math.inf)
    useful = max(math.ceil(SPARE * sequences * usual), pages_per_sequence) + 1
    if num_pages is None:
        num_pages = useful
        if memory is not None:
            left = CPU_SHARE * memory if on_cpu else USABLE * memory - weights - working
            fitting = max(int(left // each), 0)
            num_pages = min(fitting, useful if on_cpu else MOST_SPARE * useful)
    plan = MemoryPlan(weights, num_pages * each, working, memory, num_pages, page_size)
    if num_pages < pages_per_sequence + 1:
        needed = (pages_per_sequence + 1) * each
        raise InputError(
            f"a sequence of {pages_per_sequence * page_size:,} tokens needs {needed / GIB:.2f} GiB "
            f"of pages on a device, which has {(memory or 0) / GIB:.2f} GiB in all "
            f"(weights {weights / GIB:.2f}, working memory {working / GIB:.2f}): lower "
            "max_model_len"
        )
    return plan


def device_memory() -> int | None:
    """Returns the memory of the first device in bytes; on a CPU, the machine's memory."""
    device = jax.local_devices()[0]
    stats = device.memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None
