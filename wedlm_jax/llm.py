"""The Python API: `LLM` and what it returns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from pathlib import Path

import jax
import jax.numpy as jnp

from wedlm_jax.attention import check_runs_on
from wedlm_jax.batch_sizes import BatchSizes, largest_cache
from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine import Engine
from wedlm_jax.errors import InputError
from wedlm_jax.hf import load_checkpoint
from wedlm_jax.length_classes import engine_classes
from wedlm_jax.logprobs import TokenLogprob
from wedlm_jax.prompts import Prompt, as_list, as_token_ids, for_each, is_integer, numbered
from wedlm_jax.quantization import check_quantization, quantize_weights
from wedlm_jax.row_result import RowResult
from wedlm_jax.samples import Samples
from wedlm_jax.sampling import MOST_LOGPROBS, SamplingParams
from wedlm_jax.scheduler import Row, Scheduler
from wedlm_jax.scoring import score
from wedlm_jax.sharding import shards
from wedlm_jax.tally import Progress, Tally
from wedlm_jax.text import Messages, StopStrings, TextCodec
from wedlm_jax.warmup import warm_up

EMBEDDED_MODEL = Path(__file__).parent / "embedded"
DTYPES = ("float32", "bfloat16")


class LLM:
    """A checkpoint, ready to decode.

    Args:
      model: a folder in Hugging Face format, or a hub id; the embedded model by default.
      window_size: W, the masked slots decoded in parallel; 0 is autoregressive decoding;
        "auto" chooses while decoding, by the rows and by what a forward costs: then a row's
        tokens may depend on the machine.
      dtype: "float32" or "bfloat16"; by default float32 on a CPU, bfloat16 elsewhere.
      max_model_len: prompt and completion tokens at most; the model's context by default.
      max_batch_size: prompts that decode together, at most.
      max_cache_tokens: rows of KV cache of all prompts that decode together, at most. Then short
        prompts decode with short ones, as many as ``max_batch_size``, and long ones with long ones,
        fewer at a time; by default each has as much cache as the longest.
      refill: "streaming", or "blockwise" for the paper's baseline.
      quantization: "int8" rounds the weights of matrices to 8 bits; None leaves them.
      kv_cache_dtype: "int8" rounds keys and values to 8 bits; None leaves them in ``dtype``.
      attention: of the decode windows: "dense"; "ragged", a TPU kernel, the default there for heads
        of 128 and a cache that is not int8; "ragged_triton", a kernel for NVIDIA GPUs.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        window_size: int | str = 16,
        dtype: str | None = None,
        max_model_len: int | None = None,
        max_batch_size: int = 16,
        max_cache_tokens: int | None = None,
        refill: str = "streaming",
        quantization: str | None = None,
        kv_cache_dtype: str | None = None,
        attention: str | None = None,
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
        self.dtype = dtype
        self.max_batch_size, self.max_cache_tokens = max_batch_size, max_cache_tokens
        self.quantization = quantization
        self._sizes: tuple[BatchSizes, ...] = ()
        weights = load_checkpoint(self.folder, dtype=jnp.dtype(dtype))
        self.engine = Engine(
            quantize_weights(weights) if quantization else weights,
            window_size=window_size,
            refill=refill,
            max_model_len=max_model_len,
            attention=attention,
            kv_cache_dtype=kv_cache_dtype,
        )
        check_runs_on(self.engine.attention, jax.default_backend())
        if max_cache_tokens is not None:
            cuts = shards("batch")
            least = cuts * largest_cache(self.engine)
            if not is_integer(max_cache_tokens) or max_cache_tokens < least:
                raise InputError(
                    f"max_cache_tokens: expected at least {least}, the cache of {cuts} prompt"
                    f"{'s' * (cuts > 1)} of max_model_len {self.engine.max_model_len}, not "
                    f"{max_cache_tokens!r}"
                )

    def warm_up(
        self,
        params: SamplingParams | None = None,
        on_step: Callable[[int, int], None] | None = None,
    ) -> None:
        """Compiles all that prompts can need which fit, with completions of at most
        ``params.max_tokens``, into ``max_model_len``. From then on rows of `generate`, `chat` and
        `run` have that size; `stream` has one row, for which its first call compiles.

        Args:
          params: what rows ask for; other options than these are compiled when a row has them.
          on_step: told after each step how many are done, of how many.

        Raises:
          InputError: rows of that size do not fit into the device's memory.
        """
        params = params or SamplingParams()
        if params.max_tokens >= self.engine.max_model_len:
            raise InputError(
                f"max_tokens {params.max_tokens} leaves no room for a prompt in max_model_len "
                f"{self.engine.max_model_len}"
            )
        row = ([0], self._with_bad_words_as_ids(params))
        # A prompt may be longer where its completion is shorter, and is then padded further.
        largest = largest_cache(self.engine)
        self._sizes = tuple(
            BatchSizes.for_rows(
                self.engine, [row], count=each.rows, cache_size=each.cache_size or largest
            )
            for each in engine_classes(self.engine, self.max_batch_size, self.max_cache_tokens)
        )
        warm_up(self.engine, self._sizes, on_step)

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
        rows = self.prepare(prompts, params, many_samples=True)
        results = dict(item for batch in self.run(rows, on_progress) for item in batch)
        return [results[i] for i in range(len(rows))]

    def run(
        self,
        rows: Iterable[Row],
        on_progress: Callable[[Progress], None] | None = None,
        *,
        stopping: Callable[[], bool] | None = None,
    ) -> Iterator[list[tuple[int, Completion]]]:
        """Decodes rows that `prepare` or `prepare_one` has checked.

        Args:
          rows: read as they are needed, some way ahead (`wedlm_jax.scheduler.LOOKAHEAD`).
          on_progress: called between slices of the decode loop.
          stopping: once it says so, rows under way are finished and no others begun.

        Yields:
          Some rows at a time, as they finish and in no order to rely on: their places in
          ``rows``, and what became of them.
        """
        total = len(rows) if isinstance(rows, Sized) else None
        tally = Tally(total, on_progress)
        samples: Samples[Sequence[int], Completion] = Samples(rows)
        scheduler = Scheduler(
            self.engine, samples.rows(), rows=self.max_batch_size, is_over=self._is_over,
            on_turn=tally.running, stopping=stopping, max_cache_tokens=self.max_cache_tokens,
            sizes=self._sizes,
        )  # fmt: skip
        for finished in scheduler.run():
            done: list[tuple[int, Completion]] = []
            for number, result in finished:
                completion = self._completion(result, samples.params_of(number))
                tally.add(completion)
                if (whole := samples.finish(number, completion)) is not None:
                    prompt, (first, *further) = whole
                    done.append((prompt, dataclasses.replace(first, further=tuple(further))))
            tally.finished(len(done))
            if done:
                yield done

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
            raise InputError(f"expected a completion a prompt, not {len(completions)} for "
                             f"{len(prompts)}")  # fmt: skip
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
        batch = self.engine.start([token_ids], [sampling])
        sent_tokens = sent_text = 0
        running = True
        while running:
            running = not batch.advance(1)
            row = batch.results()[0]
            if len(row.token_ids) == sent_tokens and running:
                continue
            completion = self._completion(row, sampling)
            text = completion.text or ""
            if completion.finish_reason is None and self.codec and sampling.stop:
                text = text[: StopStrings(self.codec, sampling.stop).safe_length(text)]
            yield Chunk(text[sent_text:], completion.token_ids[sent_tokens:], completion)
            sent_tokens, sent_text = len(completion.token_ids), max(len(text), sent_text)
            running = running and completion.finish_reason is None

    def prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        *,
        many_samples: bool = False,
    ) -> list[Row]:
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
    ) -> Row:
        """As `prepare`, for one prompt."""
        if params.n > 1 and not many_samples:
            raise InputError(
                f"n: expected 1 here, not {params.n}; LLM.generate, LLM.chat and jobs over files "
                "give several samples"
            )
        token_ids = self._as_ids(prompt)
        if params.stop:
            self._require_codec("stop strings")
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

    def _is_over(self, row: RowResult, sampling: SamplingParams) -> bool:
        """Whether a stop string has come, which only text can tell."""
        return self._completion(row, sampling).finish_reason is not None

    def _completion(self, row: RowResult, sampling: SamplingParams) -> Completion:
        text = None
        if self.codec is not None:
            ids = row.token_ids[:-1] if row.finish_reason == "stop" else row.token_ids
            text = self.codec.complete_text(ids)
            if sampling.stop:
                stop_strings = StopStrings(self.codec, sampling.stop, sampling.min_tokens)
                if found := stop_strings.find(ids):
                    length, text = found
                    row = row.cut(length)
        return Completion(
            text, row.token_ids, row.finish_reason, row.num_forwards, row.num_token_instances,
            row.logprobs,
        )  # fmt: skip


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
