"""`EngineConfig`: the options of an engine and of the model that it decodes with.

Each field states its meaning and its valid values once. The arguments of `LLM`, the flags of the
commands and the tables in the documentation are generated from that (see `ENGINE_OPTIONS`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any

from wedlm_jax.option_values import Option, options_of

DTYPES = ("float32", "bfloat16")
ATTENTION = ("xla", "gather", "rpa")
DEFAULT_WINDOW = 16
"""The default window of mode "paper", fixed since the tokens of that mode depend on it."""
MOST_SEQUENCES = 2**16
"""An upper bound on sequences that decode together, far above what pays; tables of their pages
would not fit into memory."""
MOST_LOOKUP = 15
"""Maximum number of drafts copied from a text."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How a checkpoint is loaded and decoded.

    An `Engine` used without `LLM` decodes token ids with the parameters it is given. ``dtype``,
    ``quantization``, ``mesh`` and the options about text only matter to `LLM`, which loads the
    checkpoint.

    Raises:
      InputError: a value is invalid; the message names the field and what was expected.
    """

    window_size: Annotated[
        int | str | None,
        Option(
            "W, the number of masks that draft in parallel. 0: none, which decodes "
            "autoregressively. auto: chosen for speed, per sequence, while it decodes; in mode "
            "paper the tokens may then depend on the machine",
            low=0,
            also=("auto",),
            none=f"auto, but {DEFAULT_WINDOW} in mode paper; 0 for a checkpoint that was not "
            "trained on masks and has no drafter",
        ),
    ] = None
    drafter: Annotated[
        str | None,
        Option(
            "folder of adapters, trained by `wedlm train` with objective drafter, that let masks "
            "draft for this checkpoint; they do not change its tokens",
            text="DIR",
            none="none",
        ),
    ] = None
    dtype: Annotated[
        str | None,
        Option(
            "dtype of weights and arithmetic",
            choices=DTYPES,
            none="float32 on a CPU, else bfloat16",
        ),
    ] = None
    quantization: Annotated[
        str | None,
        Option(
            "round weight matrices to 8 bits; needs the extra int8",
            choices=("int8",),
            none="no rounding",
        ),
    ] = None
    kv_cache_dtype: Annotated[
        str | None,
        Option("round keys and values to 8 bits", choices=("int8",), none="same as dtype"),
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "maximum tokens of a prompt and its completion together",
            low=1,
            none="the model's context",
        ),
    ] = None
    max_batch_size: Annotated[
        int,
        Option(
            "maximum sequences that decode together on each replica of the model",
            low=1,
            high=MOST_SEQUENCES,
        ),
    ] = 16
    mesh: Annotated[
        Mapping[str, int] | None,
        Option(
            "devices of this machine to use, by axis: tensor shards the weights, data makes "
            "replicas, each with its own sequences",
            none="one device",
        ),
    ] = None
    deterministic: Annotated[
        bool,
        Option(
            "compute every forward in one shape, so that a prompt's tokens depend only on the "
            "prompt, even in bfloat16; slower",
        ),
    ] = False
    chat_template_kwargs: Annotated[
        Mapping[str, Any] | None,
        Option(
            'variables of the chat template, such as {"enable_thinking": false}, for '
            "conversations that do not set them",
            none="none",
        ),
    ] = None
    trust_special_tokens: Annotated[
        bool,
        Option(
            "parse special tokens in messages, which can then end a turn and start another; by "
            "default they are plain text",
        ),
    ] = False
    generation_config: Annotated[
        str,
        Option(
            "auto: options that are not given follow the model's generation_config.json; none: "
            "decode greedily. Stop tokens always come from that file, too",
            choices=("none", "auto"),
        ),
    ] = "none"
    attention: Annotated[
        str | None,
        Option(
            "xla and gather run on any device, rpa is a kernel for TPUs",
            choices=ATTENTION,
            none="gather on a GPU, rpa on a TPU with heads of 128 and no int8 cache, else xla",
        ),
    ] = None
    lookup: Annotated[
        int | None,
        Option(
            "maximum drafts copied from a sequence's own text; without windows they are used where "
            "that saves time, with windows of a model that was trained on masks only for prompts "
            "that ask for them",
            low=0,
            high=MOST_LOOKUP,
            none=f"{MOST_LOOKUP}; 0 where window_size is 0",
        ),
    ] = None
    backup_masks: Annotated[
        int | None,
        Option(
            "maximum backup masks, which assume that the least certain draft is wrong, so that "
            "drafts remain if it is; used with windows, in mode verified",
            low=0,
            none="0 on a CPU, else 8",
        ),
    ] = None
    page_size: Annotated[
        int | None,
        Option("tokens per page of the cache", low=1, none="what suits the device"),
    ] = None
    num_pages: Annotated[
        int | None,
        Option(
            "pages per replica, one of them spare",
            low=2,
            none="as many as fit and are useful",
        ),
    ] = None
    chunk_tokens: Annotated[
        int | None,
        Option(
            "maximum prompt tokens per forward, in addition to windows",
            low=1,
            none="what suits the device",
        ),
    ] = None

    def __post_init__(self) -> None:
        for name, option in ENGINE_OPTIONS.items():
            option.check(name, getattr(self, name))

    def drafting(self, *, knows_masks: bool) -> tuple[int | str, int]:
        """Returns the window (a number or "auto") and the maximum number of copied drafts.

        Args:
          knows_masks: whether the model was trained on masks.
        """
        window, lookup = self.window_size, self.lookup
        if lookup is None:
            # An explicit window of 0 asks for AR, without drafts of any kind.
            lookup = 0 if window == 0 else MOST_LOOKUP
        if window in (None, "auto") and not knows_masks:
            return 0, lookup
        return "auto" if window is None else window, lookup


ENGINE_OPTIONS: Mapping[str, Option] = options_of(EngineConfig)
"""The `Option` of every field, in the order of the fields."""
