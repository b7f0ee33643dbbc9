"""The Python API: `LLM`."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_type_hints

import jax
import jax.numpy as jnp

from wedlm_jax.checkpoint.adapters import check_drafter, with_drafter
from wedlm_jax.checkpoint.hf import read_generation_config
from wedlm_jax.checkpoint.model import load_checkpoint
from wedlm_jax.checkpoint.open import (
    find_model,
    open_checkpoint,
    read_architecture,
    tokenizer_folder,
)
from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.engine.config import ENGINE_OPTIONS, EngineConfig
from wedlm_jax.engine.engine import Engine, runs_apart
from wedlm_jax.engine.interface import Traced
from wedlm_jax.engine.loop import EngineLoop
from wedlm_jax.engine.scoring import score
from wedlm_jax.engine.settings import longest_text
from wedlm_jax.errors import InputError, did_you_mean, nearest
from wedlm_jax.generation import Generation, Handle, Mailbox, Prepared, Windowed
from wedlm_jax.grammar.guidance import TokenizerGrammars
from wedlm_jax.host.compiled_cache import ProgramStore, program_folder
from wedlm_jax.host.notices import notice
from wedlm_jax.host.progress import BusyNotice, Progress, saying, so_far
from wedlm_jax.host.storage import as_path
from wedlm_jax.messages import template_variables
from wedlm_jax.model.quantization import check_quantization
from wedlm_jax.params import MOST_LOGPROBS, OPTIONS, SamplingParams
from wedlm_jax.sharding import make_local_mesh
from wedlm_jax.text import (
    Messages,
    Prompt,
    TextCodec,
    as_list,
    as_token_ids,
    for_each,
    is_integer,
    numbered,
)

MESH_AXES = {"tensor_parallel_size": "tensor", "tp": "tensor", "data_parallel_size": "data"}
"""Other engines' names for the size of an axis of `LLM`'s mesh."""
STREAM_SECONDS = 0.04
"""How long two bursts of a stream should take; each may yield a chunk. Readers notice no shorter
delay."""

P = ParamSpec("P")
T = TypeVar("T")


def _with_hints(method: Callable[P, T]) -> Callable[P, T]:
    """Adds a hint at the probable name to the error for an unknown keyword argument."""
    of_model = method.__name__ == "__init__"
    known = [name for name in inspect.signature(method).parameters if name != "self"]
    known = ["model", *ENGINE_OPTIONS] if of_model else known
    shown = "LLM" if of_model else f"LLM.{method.__name__}"

    def hint(name: str) -> str:
        if name in MESH_AXES and "mesh" in known:
            return f'did you mean mesh={{"{MESH_AXES[name]}": N}}?'
        near = None if name in OPTIONS else nearest(name, known)
        field = name if name in OPTIONS else nearest(name, OPTIONS)
        if near is None and field is not None:
            return f"did you mean SamplingParams({field}=...)?"
        return did_you_mean(name, known)

    @functools.wraps(method)
    def checked(*args: P.args, **given: P.kwargs) -> T:
        for name in given:
            if name not in known:
                raise TypeError(f"{shown}: unknown argument {name!r}; {hint(name)}")
        return method(*args, **given)

    return checked


class LLM:
    """A checkpoint loaded for decoding.

    Several threads may use it at once: their sequences decode together, and each thread gets the
    results that it would get alone.

    Args:
      model: a folder in Hugging Face format, an orbax folder of `wedlm convert`, a folder of LoRA
        adapters in PEFT's layout, or a hub id; the included model by default.
      options: the fields of `wedlm_jax.engine.config.EngineConfig`, such as ``window_size``,
        ``max_batch_size`` or ``dtype``.

    Attributes:
      name: the model's name in messages, as it was given.
      default_params: sampling parameters of prompts that come without any.
    """

    @_with_hints
    def __init__(self, model: str | Path | None = None, **options: Any):
        if isinstance(options.get("drafter"), Path):
            options["drafter"] = str(options["drafter"])
        config = self.options = EngineConfig(**options)
        self.dtype = config.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
        check_quantization(config.quantization)
        self.folder = find_model(model)
        longest_text(config, read_architecture(self.folder))  # before anything is loaded
        if config.drafter is not None:
            check_drafter(as_path(config.drafter))
        self.name = str(self.folder if model is None else model).rstrip("/")
        text_folder = tokenizer_folder(self.folder)
        self.generation_config = read_generation_config(text_folder)
        self.default_params = SamplingParams()
        if config.generation_config == "auto":
            self.default_params = self.generation_config.params()
        variables = template_variables(kwargs=config.chat_template_kwargs)
        mesh = None if config.mesh is None else make_local_mesh(config.mesh)
        with saying(so_far(f"loading {self.name}")):
            self.codec = TextCodec.load(
                text_folder,
                variables=variables,
                trust_special_tokens=config.trust_special_tokens,
            )
            weights = load_checkpoint(
                self.folder,
                dtype=jnp.dtype(self.dtype),
                mesh=mesh,
                stacked=not runs_apart(),
                quantization=config.quantization,
            )
            if config.drafter is not None:
                weights = with_drafter(weights, open_checkpoint(self.folder), config.drafter, mesh)
        # Hints about surprising behaviour that have not been shown yet: that a chat template is not
        # applied, and that the model decodes as AR if no window was chosen and it knows no masks.
        self._chat_end = self.codec and self.codec.chat_end
        without = config.window_size in (None, "auto") and not weights.config.knows_masks
        self._unmasked_type = weights.config.model_type if without else None
        vocabulary = weights.config.vocab_size, weights.config.eos_token_ids
        folder = program_folder()
        store = None if folder is None else ProgramStore(folder)
        self.engine = Engine(
            weights,
            config,
            mesh=mesh,
            grammars=None if self.codec is None else TokenizerGrammars(self.tokenizer, *vocabulary),
            known_tokens=None if self.codec is None else self.codec.token_ids,
            store=store,
        )
        kept = folder if store is not None and store.is_writable else None
        self.engine.device.programs.while_busy = BusyNotice(kept)
        self._loop = EngineLoop(self.engine)

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"LLM({str(self.folder)!r}, {engine.config.model_type}, "
            f"{engine.num_parameters / 1e6:,.1f}M parameters, {self.dtype}, "
            f"window_size={engine.window_size!r}, max_batch_size={self.options.max_batch_size})"
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `transformers`; None if the checkpoint has none."""
        return None if self.codec is None else self.codec.tokenizer

    def warm_up(
        self,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        everything: bool = False,
    ) -> None:
        """Compiles the programs for prompts of any length with these parameters.

        Args:
          sampling_params: parameters of later prompts; prompts with others compile on arrival.
          everything: also compile a program for all options. It is slower than one for a few
            options, but serves any prompt without compiling.
        """
        given = sampling_params or [self.default_params]
        given = [given] if isinstance(given, SamplingParams) else given
        for one in given:
            self.check_draft(one)
            self._tell_of_mode(one)
        with self._loop.paused():
            self.engine.expect([self._with_bad_words_as_ids(one) for one in given])
            self.engine.compile()
            if everything:
                self.engine.compile_program(self.engine.everything)

    @_with_hints
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """Completes prompts, and returns their completions in order. If ``n`` is above 1, the
        ``samples`` of each has all ``n``.

        Args:
          prompts: texts or token-id lists, one or many.
          sampling_params: one for all, or one for each; by default ``default_params``.
          on_progress: called between bursts of forwards.

        Raises:
          InputError: a prompt cannot be decoded; raised before anything runs.
        """
        prepared = self.prepare(prompts, sampling_params, many_samples=True)
        results = dict(item for some in self.run(prepared, on_progress) for item in some)
        return [results[i] for i in range(len(prepared))]

    def run(
        self,
        prompts: Iterable[Prepared | Windowed],
        on_progress: Callable[[Progress], None] | None = None,
        *,
        stopping: Callable[[], bool] | None = None,
        on_failure: Callable[[int, InputError], None] | None = None,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Decodes prompts that `prepare` or `prepare_one` has checked.

        Args:
          prompts: the prompts, read a little before they are needed; an optional third item is the
            prompt's window (W), checked by `Engine.check_window`.
          on_progress: called between bursts of forwards.
          stopping: once it returns True, running prompts are finished and no others started.
          on_failure: called with the index of a prompt that could not be decoded to its end (its
            grammar exceeded its limits), and the error; by default the error is raised.

        Yields:
          batches of finished prompts, in no particular order: their indices in ``prompts``, and
          their completions.
        """
        return iter(
            Generation(
                self._loop,
                self.codec,
                prompts,
                on_progress=on_progress,
                stopping=stopping,
                on_failure=on_failure,
            )
        )

    @_with_hints
    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """Completes conversations, rendered with the chat template; see `generate`.

        Args:
          conversations: messages with ``role`` and ``content``; one conversation or many.
          tools, chat_template_kwargs: as for `chat_prompt`, for all conversations.
        """
        if not isinstance(conversations, Sequence) or isinstance(conversations, str):
            raise InputError(
                f"conversations: expected lists of messages, not {type(conversations).__name__}"
            )
        single = bool(conversations) and isinstance(conversations[0], dict)
        many: Any = [conversations] if single else conversations
        prompts: list[Prompt] = []
        for number, messages in enumerate(many):
            with numbered("conversation", number, len(many)):
                prompts.append(
                    self.chat_prompt(
                        messages, tools=tools, chat_template_kwargs=chat_template_kwargs
                    )
                )
        return self.generate(prompts, sampling_params, on_progress=on_progress)

    def chat_prompt(
        self,
        messages: Messages,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Returns the token ids of a conversation, ready for the assistant's turn.

        Args:
          messages: messages in OpenAI's format, tool calls and their results included; see
            `wedlm_jax.messages.checked_messages`.
          tools: functions that the model may call, for templates that support them.
          chat_template_kwargs: variables of the template, such as ``{"enable_thinking": False}``.

        Raises:
          InputError: there is no chat template, or the messages do not fit it.
        """
        codec = self._require_codec("messages")
        variables = template_variables(tools, chat_template_kwargs)
        codec.check_tools(variables)
        return codec.encode_chat(messages, variables)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], *, top: int = 0
    ) -> list[list[TokenLogprob]]:
        """Returns the model's autoregressive log-probability of each token of given completions,
        such as those written by masks or by another model.

        Args:
          prompts, completions: texts or token-id lists, the same number of each. No prompt may be
            empty.
          top: how many of the most probable tokens to return for each place.

        Raises:
          InputError: a pair cannot be scored; the message names the first one (from 0), and why.
        """
        if len(prompts) != len(completions):
            raise InputError(
                f"expected as many completions as prompts ({len(prompts)}), not {len(completions)}"
            )
        if not is_integer(top) or not 0 <= top <= MOST_LOGPROBS:
            raise InputError(f"top: expected an integer from 0 to {MOST_LOGPROBS}, not {top!r}")
        texts = []
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            with numbered("pair", number, len(prompts)):
                first, second = self.as_ids(prompt), self.as_ids(completion)
                self.engine.check(first, SamplingParams(max_tokens=max(len(second), 1)))
                if len(second):
                    self.engine.check(second, SamplingParams(max_tokens=len(first)))
                texts.append((first, second))
        return score(self.engine, texts, top, self._loop.paused)

    @_with_hints
    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        window: int | None = None,
        stopping: Callable[[], bool] | None = None,
        on_forward: Callable[[Traced], None] | None = None,
    ) -> Iterator[Chunk]:
        """Completes one prompt, yielding whenever tokens are committed.

        The texts of the chunks join to the text that `generate` returns: none contains part of a
        character, of a stop string, or of a stop token.

        Args:
          window: W, at most the engine's window, which is the default.
          stopping: once it returns True, nothing more is decoded.
          on_forward: called with each forward; a separate program then records them.
        """
        token_ids, sampling = self.prepare([prompt], sampling_params)[0]
        if window is not None:
            self.engine.check_window(window)
        mailbox = Mailbox(seconds=STREAM_SECONDS)
        handle = Handle(
            self._loop,
            self.codec,
            token_ids,
            sampling,
            mailbox.caller,
            window=window,
            traced=on_forward is not None,
        )
        self._loop.submit([handle.request])
        try:
            while not (handle.is_over or (stopping is not None and stopping())):
                for event in mailbox.take():
                    if isinstance(event, Traced) and on_forward is not None:
                        on_forward(event)
                    handle.take(event)
                chunk = handle.piece()
                if chunk is not None:
                    yield chunk
        finally:
            handle.abort()

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        many_samples: bool = False,
    ) -> list[Prepared]:
        """Returns the checked token ids and sampling parameters of every prompt.

        Args:
          sampling_params: one for all, or one for each; None for ``default_params``.
          many_samples: whether ``n`` may be above 1.

        Raises:
          InputError: a prompt cannot be decoded; the message names the first one (from 0), and why.
        """
        many, given = as_list(prompts), sampling_params
        each = for_each(many, self.default_params if given is None else given)
        rows = []
        for number, (prompt, one) in enumerate(zip(many, each, strict=True)):
            with numbered("prompt", number, len(many)):
                rows.append(self.prepare_one(prompt, one, many_samples=many_samples))
        return rows

    def prepare_one(
        self, prompt: Prompt, sampling_params: SamplingParams, *, many_samples: bool = False
    ) -> Prepared:
        """Does the same as `prepare` for one prompt."""
        params = sampling_params
        if params.n > 1 and not many_samples:
            raise InputError(
                f"n: expected 1 here, not {params.n}; LLM.generate, LLM.chat and jobs over files "
                "give several samples"
            )
        self.check_draft(params)
        token_ids = self.as_ids(prompt)
        if self._chat_end and isinstance(prompt, str) and self._chat_end not in prompt:
            self._chat_end = None
            notice(
                "plain-text prompts are completed without the chat template of %s; for answers use "
                "LLM.chat, --chat or records with messages",
                self.name,
            )
        self._tell_of_mode(params)
        if params.stop:
            self._require_codec("stop strings")
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(32))
        params = self._with_bad_words_as_ids(params)
        self.engine.check(token_ids, params)
        return token_ids, params

    def check_draft(self, params: SamplingParams) -> None:
        """Refuses a kind of drafts that is requested by name but not available.

        Raises:
          InputError: the drafts are not available; the message says why.
        """
        settings = self.engine.settings
        most = {"masks": settings.window, "both": settings.window, "lookup": settings.lookup}
        if params.mode != "verified" or most.get(params.draft) != 0:
            return
        if self.engine.config.knows_masks or params.draft == "lookup":
            raise InputError(f"draft: {params.draft} needs a window_size above 0")
        raise InputError(
            f"draft: {self.name} was not trained on masks, so they cannot draft; "
            "lookup and auto copy drafts from the text"
        )

    def _tell_of_mode(self, params: SamplingParams) -> None:
        """Warns once if another mode was requested and AR replaces it."""
        if self._unmasked_type is not None and params.mode == "paper":
            notice(
                "%s (%s) was not trained on masks: decoding autoregressively, as with a window of "
                "0",
                *(self.name, self._unmasked_type),
            )
            self._unmasked_type = None

    def as_ids(self, prompt: Prompt) -> Sequence[int]:
        """Returns the token ids of a prompt, which is a text or a list of token ids.

        Raises:
          InputError: the prompt is neither, or is a text and there is no tokenizer.
        """
        if isinstance(prompt, str):
            return self._require_codec("text prompts").encode(prompt)
        return as_token_ids(prompt)

    def _with_bad_words_as_ids(self, params: SamplingParams) -> SamplingParams:
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                words += self._require_codec("bad words as texts").spellings(word)
            else:
                words.append(word)
        return dataclasses.replace(params, bad_words=tuple(words)) if words else params

    def _require_codec(self, what: str) -> TextCodec:
        if self.codec is None:
            raise InputError(
                f"{self.name} has no tokenizer, which {what} need; pass token ids instead"
            )
        return self.codec


def _signature() -> inspect.Signature:
    """Returns the arguments of `LLM`, which ``**options`` would hide from editors and `help`."""
    kind, only = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    model = inspect.Parameter("model", kind, default=None, annotation=str | Path | None)
    hints, options = get_type_hints(EngineConfig), inspect.signature(EngineConfig).parameters
    given = (one.replace(kind=only, annotation=hints[name]) for name, one in options.items())
    return inspect.Signature([model, *given])


LLM.__signature__ = _signature()  # type: ignore[attr-defined]
