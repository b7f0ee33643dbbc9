"""The Python API: `LLM` and what it returns."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from wedlm_jax.checkpoint.hf import load_checkpoint
from wedlm_jax.checkpoint.hf_folder import EMBEDDED_MODEL
from wedlm_jax.completion import Chunk, Completion, Progress
from wedlm_jax.decode.logprobs import TokenLogprob
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.engine import DEFAULT_WINDOW, Engine, runs_apart
from wedlm_jax.engine.events import Failed, Finished, TokenDelta
from wedlm_jax.errors import InputError
from wedlm_jax.generation import NOTHING, Generation, Prepared, Router, complete, extended
from wedlm_jax.params import MOST_LOGPROBS, SamplingParams
from wedlm_jax.prompts import Prompt, as_list, as_token_ids, for_each, is_integer, numbered
from wedlm_jax.quantization import check_quantization
from wedlm_jax.scoring import score
from wedlm_jax.sharding import make_mesh
from wedlm_jax.text import Messages, StopStrings, TextCodec

DTYPES = ("float32", "bfloat16")
MESH_AXES = ("data", "tensor")


class LLM:
    """A checkpoint, ready to decode.

    Args:
      model: a folder in Hugging Face format, or a hub id; the embedded model by default.
      window_size: W, the masked slots decoded in parallel; 0 is autoregressive decoding;
        "auto" chooses for each sequence while it decodes, by what forwards cost and commit: then
        the tokens of mode "paper" may depend on the machine. By default 16, and 0 for a model
        that was not trained on masks (`wedlm_jax.config.ModelConfig.knows_masks`).
      dtype: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 elsewhere.
      max_model_len: prompt and completion tokens at most; the model's context by default.
      max_batch_size: sequences that decode together, at most, on each replica of the model.
      refill: "streaming", or "blockwise" for the paper's baseline.
      quantization: "int8" rounds the weights of matrices to 8 bits; None leaves them.
      kv_cache_dtype: "int8" rounds keys and values to 8 bits; None leaves them in ``dtype``.
      attention: a name in `wedlm_jax.attention.RAGGED_BACKENDS`; the one for this platform by
        default.
      deterministic: compute every forward in one shape, so that a prompt's tokens depend on
        nothing but itself, in bfloat16 too; mode "verified" then says exactly what "ar" says.
      mesh: devices of this process that share the work, such as ``{"tensor": 8}`` or
        ``{"data": 4, "tensor": 2}``: ``tensor`` cuts the weights, ``data`` makes replicas.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        window_size: int | str | None = None,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_batch_size: int = 16,
        refill: str = "streaming",
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        attention: str | None = None,
        deterministic: bool = False,
        mesh: Mapping[str, int] | None = None,
    ):
        if dtype is None:
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        if dtype not in DTYPES:
            raise InputError(f"dtype: expected one of {', '.join(DTYPES)}, not {dtype!r}")
        if not is_integer(max_batch_size) or max_batch_size < 1:
            raise InputError(f"max_batch_size: expected 1 or more, not {max_batch_size!r}")
        check_quantization(quantization)
        self.folder = resolve_model(model)
        self.codec = TextCodec.load(self.folder)
        self.dtype, self.quantization = dtype, quantization
        self.max_batch_size = max_batch_size
        devices = _mesh_of(mesh)
        weights = load_checkpoint(
            self.folder,
            dtype=jnp.dtype(dtype),
            mesh=devices,
            stacked=not runs_apart(),
            quantization=quantization,
        )
        if window_size is None:
            window_size = DEFAULT_WINDOW if weights.config.knows_masks else 0
        self.engine = Engine(
            weights,
            window_size=window_size,
            max_batch_size=max_batch_size,
            refill=refill,
            max_model_len=max_model_len,
            attention=attention,
            kv_cache_dtype=kv_cache_dtype,
            deterministic=deterministic,
            mesh=devices,
        )
        self._router = Router(self.engine)

    def __repr__(self) -> str:
        engine = self.engine
        return (
            f"LLM({str(self.folder)!r}, {engine.config.model_type}, "
            f"{engine.num_parameters / 1e6:,.1f}M parameters, {self.dtype}, "
            f"window_size={engine.window_size!r}, max_batch_size={self.max_batch_size})"
        )

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of `transformers`; None where the checkpoint has none."""
        return None if self.codec is None else self.codec.tokenizer

    def warm_up(
        self,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles all that prompts with these parameters can need, whatever their lengths. From
        then on nothing is compiled for them.

        Args:
          params: what prompts ask for; other options than these are compiled when one has them.
          on_step: told after each step how many are done, of how many.
        """
        given = [params] if isinstance(params, SamplingParams) else params or [SamplingParams()]
        self.engine.expect([self._with_bad_words_as_ids(one) for one in given])
        self.engine.compile(on_step)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """Completes prompts.

        Args:
          prompts: texts or token-id lists, one or many.
          params: one for all, or one for each.
          on_progress: called between slices of the decode loop.

        Returns:
          One result per prompt, in order; with ``n`` above 1 its ``samples`` are all of them.

        Raises:
          InputError: before anything runs, if any prompt cannot be decoded.
        """
        prepared = self.prepare(prompts, params, many_samples=True)
        results = dict(item for some in self.run(prepared, on_progress) for item in some)
        return [results[i] for i in range(len(prepared))]

    def run(
        self,
        prompts: Iterable[Prepared],
        on_progress: Callable[[Progress], None] | None = None,
        *,
        stopping: Callable[[], bool] | None = None,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Decodes prompts that `prepare` or `prepare_one` has checked.

        Args:
          prompts: read as they are needed, some way ahead.
          on_progress: called between bursts of forwards.
          stopping: once it says so, prompts under way are finished and no others begun.

        Yields:
          Some at a time, as they finish and in no order to rely on: the places in ``prompts``,
          and what became of each.
        """
        total = len(prompts) if isinstance(prompts, Sized) else None
        return iter(
            Generation(
                self._router,
                self.codec,
                prompts,
                total=total,
                on_progress=on_progress,
                stopping=stopping,
            )
        )

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_progress: Callable[[Progress], None] | None = None,
    ) -> list[Completion]:
        """As `generate`, for conversations through the chat template.

        Args:
          conversations: messages with ``role`` and ``content``; one conversation or many.
        """
        if not isinstance(conversations, Sequence) or isinstance(conversations, str):
            raise InputError(
                f"conversations: expected lists of messages, not {type(conversations).__name__}"
            )
        single = bool(conversations) and isinstance(conversations[0], dict)
        many = [conversations] if single else conversations
        prompts: list[Prompt] = []
        for number, messages in enumerate(many):
            with numbered("conversation", number, len(many)):
                prompts.append(self.chat_prompt(messages))  # type: ignore[arg-type]
        return self.generate(prompts, params, on_progress=on_progress)

    def chat_prompt(self, messages: Messages) -> list[int]:
        """The token ids of a conversation, ready for the assistant's turn.

        Raises:
          InputError: there is no chat template, or the messages do not fit it.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
            raise InputError("messages: expected a list of at least one message")
        return self._require_codec("messages").encode_chat(messages)

    def score(
        self, prompts: Sequence[Prompt], completions: Sequence[Prompt], *, top: int = 0
    ) -> list[list[TokenLogprob]]:
        """The model's autoregressive log-probability of each token of given completions, whatever
        wrote them: how probable AR decoding finds what masks were filled with.

        Args:
          prompts, completions: texts or token-id lists, as many of one as of the other. No
            prompt is empty.
          top: how many most probable tokens to give beside each.

        Raises:
          InputError: naming the first pair (from 0) that cannot be scored, and why.
        """
        if len(prompts) != len(completions):
            raise InputError(
                f"expected a completion a prompt, not {len(completions)} for {len(prompts)}"
            )
        if not is_integer(top) or not 0 <= top <= MOST_LOGPROBS:
            raise InputError(f"top: expected an integer from 0 to {MOST_LOGPROBS}, not {top!r}")
        texts = []
        for number, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
            with numbered("pair", number, len(prompts)):
                first, second = self._as_ids(prompt), self._as_ids(completion)
                self.engine.check(first, SamplingParams(max_tokens=max(len(second), 1)))
                if len(second):
                    self.engine.check(second, SamplingParams(max_tokens=len(first)))
                texts.append((first, second))
        return score(self.engine, texts, top)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Chunk]:
        """Completes one prompt, yielding whenever tokens are committed.

        The texts of the chunks together are the text that `generate` returns: none holds
        part of a character, of a stop string, or of a stop token.
        """
        token_ids, sampling = self.prepare([prompt], params)[0]
        caller = object()
        number = self._router.new_number(caller)
        submitted = [Request(number, token_ids, sampling)]
        result, sent_tokens, sent_text, running = NOTHING, 0, 0, True
        try:
            while running:
                for event in self._router.step(caller, submitted, max_forwards=1):
                    if isinstance(event, Failed):
                        raise event.error
                    if isinstance(event, TokenDelta):
                        result = extended(result, event)
                    elif isinstance(event, Finished):
                        result = event.result
                submitted = []
                completion = complete(self.codec, result, sampling)
                finished = completion.finish_reason is not None
                running = not finished
                if len(completion.token_ids) == sent_tokens and running:
                    continue
                text = completion.text or ""
                if running and self.codec and sampling.stop:
                    text = text[: StopStrings(self.codec, sampling.stop).safe_length(text)]
                yield Chunk(text[sent_text:], completion.token_ids[sent_tokens:], completion)
                sent_tokens, sent_text = len(completion.token_ids), max(len(text), sent_text)
        finally:
            self._router.leave(caller, [number] if result.finish_reason is None else [])

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        many_samples: bool = False,
    ) -> list[Prepared]:
        """Token ids and sampling parameters of every prompt, all checked.

        Args:
          many_samples: whether ``n`` may be above 1.

        Raises:
          InputError: naming the first prompt (from 0) that cannot be decoded, and why.
        """
        many = as_list(prompts)
        rows = []
        for number, (prompt, one) in enumerate(zip(many, for_each(many, params), strict=True)):
            with numbered("prompt", number, len(many)):
                rows.append(self.prepare_one(prompt, one, many_samples=many_samples))
        return rows

    def prepare_one(
        self, prompt: Prompt, params: SamplingParams, *, many_samples: bool = False
    ) -> Prepared:
        """As `prepare`, for one prompt."""
        if params.n > 1 and not many_samples:
            raise InputError(
                f"n: expected 1 here, not {params.n}; LLM.generate, LLM.chat and jobs over files "
                "give several samples"
            )
        token_ids = self._as_ids(prompt)
        if params.stop:
            self._require_codec("stop strings")
        if params.seed is None:
            params = dataclasses.replace(params, seed=secrets.randbits(32))
        params = self._with_bad_words_as_ids(params)
        self.engine.check(token_ids, params)
        if params.stop_token_ids:
            vocab, largest = self.engine.config.vocab_size, max(params.stop_token_ids)
            if largest >= vocab:
                raise InputError(f"stop_token_ids: {largest} is outside the vocabulary of {vocab}")
        return token_ids, params

    def _with_bad_words_as_ids(self, params: SamplingParams) -> SamplingParams:
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            if isinstance(word, str):
                words += self._require_codec("bad words as texts").spellings(word)
            else:
                words.append(word)
        return dataclasses.replace(params, bad_words=tuple(words)) if words else params

    def _as_ids(self, prompt: Prompt) -> Sequence[int]:
        return self._encode(prompt) if isinstance(prompt, str) else as_token_ids(prompt)

    def _encode(self, text: str) -> list[int]:
        codec = self._require_codec("text prompts")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            # A lone surrogate: half a character, which no tokenizer takes.
            raise InputError("the prompt is not text that UTF-8 can hold") from None
        return codec.encode(text)

    def _require_codec(self, what: str) -> TextCodec:
        if self.codec is None:
            raise InputError(f"{self.folder} has no tokenizer, which {what} need; give token ids")
        return self.codec


def _mesh_of(sizes: Mapping[str, int] | None) -> Mesh | None:
    if sizes is None:
        return None
    if unknown := sorted(set(sizes) - set(MESH_AXES)):
        raise InputError(f"mesh: expected {' and '.join(MESH_AXES)}, not {unknown[0]!r}")
    count = 1
    for size in sizes.values():
        count *= size
    devices = jax.local_devices()
    if not 0 < count <= len(devices):
        raise InputError(f"mesh: {dict(sizes)} takes {count} devices, and there are {len(devices)}")
    return make_mesh(dict(sizes), devices[:count])


def resolve_model(model: str | Path | None) -> Path:
    """The folder of a checkpoint: given, the embedded one, or fetched from the hub.

    Raises:
      InputError: it is neither a folder nor a hub id that can be reached.
    """
    if model is None:
        if not EMBEDDED_MODEL.is_dir():
            raise InputError("no model is embedded in this installation; name a checkpoint folder")
        return EMBEDDED_MODEL
    folder = Path(model)
    if folder.exists() or str(model).count("/") != 1 or str(model).startswith((".", "/", "~")):
        return folder
    from huggingface_hub import snapshot_download

    wanted = ["*.json", "*.safetensors", "*.txt", "*.jinja"]
    try:
        return Path(snapshot_download(str(model), allow_patterns=wanted))
    except Exception as error:
        # The hub's client raises many types; to a user all mean: not a folder, not fetched.
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"{model!r} is not a folder here and could not be fetched from the hub ({reason})"
        ) from None
