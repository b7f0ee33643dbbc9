"""Decodes prompts: submits them to the engine's loop as there is room, and collects completions as
they finish.

A caller has a `Handle` for each sequence that it has submitted. Handles add what the engine does
not know: text and stop strings. `Generation` adds several samples per prompt, and progress.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import NamedTuple, TypeAlias

from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine.interface import Event, Failed, Finished, Request, TokenDelta, Traced
from wedlm_jax.engine.loop import Caller, EngineLoop
from wedlm_jax.errors import InputError
from wedlm_jax.host.progress import Progress
from wedlm_jax.params import SamplingParams, sample_seed
from wedlm_jax.text import GrowingText, StopStrings, TextCodec

WAITING = 16
"""How many requests wait in the engine in addition to running ones, so that no place stays empty.
"""

Prepared: TypeAlias = tuple[Sequence[int], SamplingParams]
"""A checked prompt: its token ids, and how it is decoded."""

Windowed: TypeAlias = tuple[Sequence[int], SamplingParams, int | None]
"""A checked prompt with its window; None for the engine's."""

LOOK_SECONDS = 0.1
"""How often a call that waits for events checks whether it should stop."""


class Mailbox:
    """Receives the events of requests for a thread that waits for them; ``seconds`` are those of
    its `Caller`."""

    def __init__(self, *, seconds: float | None = None):
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.caller = Caller(self._events.put, seconds=seconds)

    def take(self) -> list[Event]:
        """Returns the events that have arrived; waits up to `LOOK_SECONDS` if there are none."""
        events: list[Event] = []
        try:
            events += self._events.get(timeout=LOOK_SECONDS)
            while True:
                events += self._events.get_nowait()
        except queue.Empty:
            return events


class Counts(NamedTuple):
    """The counts of a sequence so far, as in its `Completion`."""

    tokens: int = 0
    forwards: int = 0
    instances: int = 0


class Handle:
    """A caller's handle of a submitted sequence: takes its events and builds its completion.

    Args:
      loop: the engine's loop.
      codec: the tokenizer; None if there is none.
      prompt, params, window, traced: the fields of its request.
      caller: receives its events, and must pass them to `take`.
      growing: whether the completion is needed while it grows. Stop strings need it, too, since the
        engine knows only token ids; otherwise the whole text is made at the end, which is cheaper.

    Attributes:
      request: the request to submit.
      completion: the completion so far, if it is growing; the whole completion at the end.
      counts: tokens, forwards and instances so far.
      is_over: whether the sequence has ended, for any reason; no event changes it after that.
    """

    def __init__(
        self,
        loop: EngineLoop,
        codec: TextCodec | None,
        prompt: Sequence[int],
        params: SamplingParams,
        caller: Caller,
        *,
        window: int | None = None,
        traced: bool = False,
        growing: bool = True,
    ):
        self.caller, self._loop, self._codec, self._params = caller, loop, codec, params
        number = loop.new_number()
        self.request = Request(number, prompt, params, window, traced=traced, handle=self)
        self._grows = growing or bool(params.stop)
        self._growing = GrowingText(codec) if codec is not None and self._grows else None
        self._stop = None
        if codec is not None and params.stop:
            self._stop = StopStrings(codec, params.stop, params.min_tokens)
        self.completion = Completion(None if codec is None else "", [], None, 0, 0)
        self.counts, self.is_over = Counts(), False
        self._sent_tokens = self._sent_text = 0

    def take(self, event: Event) -> None:
        """Updates the completion with an event of the sequence.

        Raises:
          Exception: the reason why it could not be decoded to its end.
        """
        if self.is_over or isinstance(event, Traced):
            return
        if isinstance(event, Failed):
            self.is_over = True
            raise event.error
        if isinstance(event, Finished):
            self._end(complete(self._codec, event.result, self._params))
            return
        self.counts = Counts(event.num_output, event.num_forwards, event.num_token_instances)
        if self._grows:
            self._grow(event)

    def abort(self) -> None:
        """Ends the sequence unless it is over."""
        if not self.is_over:
            self.is_over = True
            self._loop.abort([self.request.number])

    def piece(self) -> Chunk | None:
        """Returns what was added since the last piece and is final; None if there are no new
        tokens. The texts of all pieces together are the completion's text."""
        completion = self.completion
        whole = completion.finish_reason is not None
        if len(completion.token_ids) == self._sent_tokens and not whole:
            return None
        text = completion.text or ""
        if self._stop is not None and not whole:
            text = text[: self._stop.safe_length(text)]
        new = completion.token_ids[self._sent_tokens :]
        chunk = Chunk(text[self._sent_text :], new, completion)
        self._sent_tokens = len(completion.token_ids)
        self._sent_text = max(len(text), self._sent_text)
        return chunk

    def _grow(self, delta: TokenDelta) -> None:
        before = self.completion
        text = None if self._growing is None else self._growing.add(delta.token_ids)
        logprobs = before.logprobs
        if delta.logprobs is not None:
            logprobs = [*(logprobs or []), *delta.logprobs]
        self.completion = now = dataclasses.replace(
            before,
            text=text,
            token_ids=before.token_ids + delta.token_ids,
            num_forwards=delta.num_forwards,
            num_token_instances=delta.num_token_instances,
            forwards_at=before.forwards_at + delta.forwards_at,
            instances_at=before.instances_at + delta.instances_at,
            drafts_at=before.drafts_at + delta.drafts_at,
            logprobs=logprobs,
            num_cached_tokens=delta.num_cached_tokens,
        )
        if text is None or before.text is None or self._stop is None:
            return
        if self._stop.stands_in(text, len(before.text)):
            found = complete(self._codec, now, self._params)
            if found.finish_reason is not None:
                self.abort()
                self._end(found)

    def _end(self, whole: Completion) -> None:
        # A stop string cuts off tokens that the same forwards have committed after it.
        forwards, instances = whole.num_forwards, whole.num_token_instances
        self.counts = Counts(len(whole.token_ids), forwards, instances)
        self.completion, self.is_over = whole, True


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt that is being decoded.

    Attributes:
      place: its index among all prompts.
      samples: the samples submitted so far.
      failed: whether one of them could not be decoded.
    """

    place: int
    params: SamplingParams
    samples: list[Handle] = dataclasses.field(default_factory=list)
    failed: bool = False

    def completion(self) -> Completion | None:
        """Returns the completion with all samples; None while some are missing."""
        if len(self.samples) < self.params.n or not all(one.is_over for one in self.samples):
            return None
        first, *further = (one.completion for one in self.samples)
        return dataclasses.replace(first, further=tuple(further))


class Generation:
    """One call that decodes prompts: an iterator over batches of completions. `LLM.run` describes
    the arguments that are not listed here.

    Args:
      loop: the engine's loop.
      codec: the tokenizer; None if there is none.
    """

    def __init__(
        self,
        loop: EngineLoop,
        codec: TextCodec | None,
        prompts: Iterable[Prepared | Windowed],
        *,
        on_progress: Callable[[Progress], None] | None = None,
        stopping: Callable[[], bool] | None = None,
        on_failure: Callable[[int, InputError], None] | None = None,
    ):
        self._loop, self._codec, self._on_failure = loop, codec, on_failure
        self._mailbox = Mailbox()
        self._samples = self._samples_of(prompts)
        self._on_progress, self._stopping = on_progress, stopping or (lambda: False)
        self._under_way: dict[Handle, _Prompt] = {}
        self._total = len(prompts) if isinstance(prompts, Sized) else None
        self._finished, self._counts = 0, Counts()
        self._room = loop.engine.settings.sequences + WAITING

    def __iter__(self) -> Iterator[list[tuple[int, Completion]]]:
        """Yields the indices of finished prompts, and their completions."""
        try:
            while True:
                self._submit()
                if not self._under_way:
                    return
                if done := self._take(self._mailbox.take()):
                    yield done
        finally:
            self._give_up(self._under_way.values())

    def _samples_of(
        self, prompts: Iterable[Prepared | Windowed]
    ) -> Iterator[tuple[Handle, _Prompt]]:
        for place, (token_ids, params, *window) in enumerate(prompts):
            prompt = _Prompt(place, params)
            for one in sample_params(params):
                if prompt.failed:
                    break
                handle = Handle(
                    self._loop,
                    self._codec,
                    token_ids,
                    one,
                    self._mailbox.caller,
                    window=window[0] if window else None,
                    growing=False,
                )
                prompt.samples.append(handle)
                yield handle, prompt

    def _submit(self) -> None:
        if self._stopping():
            # Prompts without tokens are given up, and prompts with samples that were never
            # submitted: no more samples are started, so these would never be complete.
            self._give_up(
                prompt
                for prompt in self._under_way.values()
                if len(prompt.samples) < prompt.params.n
                or not any(one.counts.tokens for one in prompt.samples)
            )
            return
        new = dict(itertools.islice(self._samples, self._room - len(self._under_way)))
        self._under_way |= new
        if new:
            self._loop.submit([handle.request for handle in new])

    def _give_up(self, prompts: Iterable[_Prompt]) -> None:
        """Aborts all samples of prompts."""
        for handle in [one for prompt in set(prompts) for one in prompt.samples]:
            handle.abort()
            self._under_way.pop(handle, None)

    def _take(self, events: Sequence[Event]) -> list[tuple[int, Completion]]:
        done: list[tuple[int, Completion]] = []
        for event in events:
            handle: Handle = event.request.handle
            prompt = self._under_way.get(handle)
            if prompt is None:
                continue
            before = handle.counts
            try:
                handle.take(event)
            except InputError as error:
                if self._on_failure is None:
                    raise
                prompt.failed = True
                self._give_up([prompt])
                self._on_failure(prompt.place, error)
                continue
            counts = zip(self._counts, before, handle.counts, strict=True)
            self._counts = Counts(*(total + new - old for total, old, new in counts))
            if handle.is_over:
                del self._under_way[handle]
                if (completion := prompt.completion()) is not None:
                    done.append((prompt.place, completion))
        self._finished += len(done)
        if self._on_progress is not None:
            self._on_progress(Progress(self._finished, self._total, *self._counts))
        return done


def sample_params(params: SamplingParams) -> Iterator[SamplingParams]:
    """Yields the parameters of each of a prompt's ``n`` samples, for its request."""
    if params.n == 1:
        yield params
        return
    assert params.seed is not None, "drawn when the prompt was prepared"
    for sample in range(params.n):
        yield dataclasses.replace(params, n=1, seed=sample_seed(params.seed, sample))


def complete(codec: TextCodec | None, result: Completion, params: SamplingParams) -> Completion:
    """Returns a sequence's completion with its text, cut at the first stop string."""
    text = None
    if codec is not None:
        ids = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
        text = codec.complete_text(ids)
        if params.stop:
            found = StopStrings(codec, params.stop, params.min_tokens).find(ids)
            if found is not None:
                length, text = found
                result = result.cut(length)
    return dataclasses.replace(result, text=text)
