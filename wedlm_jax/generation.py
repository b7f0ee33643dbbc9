"""Calls that decode prompts: submit them to the engine's loop as there is room, and collect
completions as they finish.

Adds what the engine does not know: several samples of a prompt, stop strings, and progress.
"""

from __future__ import annotations

import dataclasses
import itertools
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine.interface import Event, Failed, Finished, Request, TokenDelta, Traced
from wedlm_jax.engine.loop import Caller, EngineLoop
from wedlm_jax.errors import InputError
from wedlm_jax.host.progress import Progress
from wedlm_jax.params import SamplingParams, sample_seed
from wedlm_jax.text import GrowingText, StopStrings, TextCodec

WAITING = 16
"""Requests that wait in the engine beside those that run, enough that no place stays empty."""

Prepared: TypeAlias = tuple[Sequence[int], SamplingParams]
"""A checked prompt: its token ids, and how it is decoded."""

Windowed: TypeAlias = tuple[Sequence[int], SamplingParams, int | None]
"""A checked prompt with a window of its own, None for the engine's."""

LOOK_SECONDS = 0.1
"""How often a call that waits for events looks whether it is to stop."""


class Mailbox:
    """Where a thread waits for the events of its requests.

    Args:
      seconds: as of a `Caller`.
    """

    def __init__(self, *, seconds: float | None = None):
        self._events: queue.SimpleQueue[list[Event]] = queue.SimpleQueue()
        self.caller = Caller(self._events.put, seconds=seconds)

    def take(self) -> list[Event]:
        """Returns what has come; waits for it if there is nothing, but not for long."""
        events: list[Event] = []
        try:
            events += self._events.get(timeout=LOOK_SECONDS)
            while True:
                events += self._events.get_nowait()
        except queue.Empty:
            return events


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt that is being decoded.

    Attributes:
      place: its index among all prompts.
      num_submitted: samples submitted so far.
      samples: finished ones, by their number.
      failed: whether one of them could not be decoded.
    """

    place: int
    params: SamplingParams
    num_submitted: int = 0
    failed: bool = False
    samples: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _UnderWay:
    """A sequence that is being decoded, one sample of a prompt.

    Attributes:
      number: of its request.
      stream: of its text, if the prompt has stop strings.
      is_over: whether nothing more is wanted of it.
      begun: whether it has committed anything.
      num_tokens, num_forwards, num_token_instances: its counts so far.
    """

    prompt: _Prompt
    sample: int
    number: int
    stream: CompletionStream | None
    is_over: bool = False
    begun: bool = False
    num_tokens: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0


class Generation:
    """One call that decodes prompts: an iterator over batches of completions.

    Args:
      loop: of the engine.
      codec: the tokenizer; None if there is none.
      prompts: read as they are needed.
      total: how many, if known; for progress.
      on_progress: called between bursts.
      stopping: once it returns True, prompts that have tokens already are finished and no others
        are started.
      on_failure: called with the index of a prompt that could not be decoded to its end, and why;
        by default the error is raised, and ends all.
    """

    def __init__(
        self,
        loop: EngineLoop,
        codec: TextCodec | None,
        prompts: Iterable[Prepared | Windowed],
        *,
        total: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        stopping: Callable[[], bool] | None = None,
        on_failure: Callable[[int, InputError], None] | None = None,
    ):
        self._loop, self._codec, self._on_failure = loop, codec, on_failure
        self._mailbox = Mailbox()
        self._requests = self._as_requests(prompts)
        self._on_progress, self._stopping = on_progress, stopping or (lambda: False)
        self._under_way: set[_UnderWay] = set()
        self._progress = Progress(0, total, 0, 0, 0)
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
            self._abort(list(self._under_way))

    def _as_requests(self, prompts: Iterable[Prepared | Windowed]) -> Iterator[Request]:
        for place, prepared in enumerate(prompts):
            token_ids, params = prepared[:2]
            window = prepared[2] if len(prepared) == 3 else None
            prompt = _Prompt(place, params)
            for sample, own in enumerate(sample_params(params)):
                if prompt.failed:
                    break
                number = self._loop.new_number()
                stream = CompletionStream(self._codec, own) if own.stop else None
                yield Request(
                    number,
                    token_ids,
                    own,
                    window,
                    caller=self._mailbox.caller,
                    owner=_UnderWay(prompt, sample, number, stream),
                )

    def _submit(self) -> None:
        if self._stopping():
            self._drop_what_is_not_finished()
            return
        submitted = list(itertools.islice(self._requests, self._room - len(self._under_way)))
        for request in submitted:
            self._under_way.add(request.owner)
            request.owner.prompt.num_submitted += 1
        if submitted:
            self._loop.submit(submitted)

    def _abort(self, gone: Sequence[_UnderWay]) -> None:
        for one in gone:
            one.is_over = True
        self._under_way.difference_update(gone)
        self._loop.abort([one.number for one in gone])

    def _drop_what_is_not_finished(self) -> None:
        """Aborts prompts without tokens, and those with samples that were never submitted: no more
        are started now, so these would never be complete."""
        begun = {one.prompt for one in self._under_way if one.begun}

        def never_complete(prompt: _Prompt) -> bool:
            has_tokens = prompt in begun or prompt.samples
            return not has_tokens or prompt.num_submitted < prompt.params.n

        self._abort([one for one in self._under_way if never_complete(one.prompt)])

    def _take(self, events: Sequence[Event]) -> list[tuple[int, Completion]]:
        done: list[tuple[int, Completion]] = []
        for event in events:
            one: _UnderWay = event.request.owner
            if one.is_over or isinstance(event, Traced):
                continue
            if isinstance(event, Failed):
                self._fail(one.prompt, event.error)
                continue
            if isinstance(event, TokenDelta):
                one.begun = True
                self._count(one, event.num_output, event.num_forwards, event.num_token_instances)
                completion = self._stopped_by_text(one, event)
                if completion is None:
                    continue
                self._abort([one])
            else:
                completion = complete(self._codec, event.result, one.prompt.params)
                one.is_over = True
                self._under_way.remove(one)
            # A stop string cuts off what the same forwards committed after it.
            self._count(
                one,
                len(completion.token_ids),
                completion.num_forwards,
                completion.num_token_instances,
            )
            done += self._finish(one, completion)
        if self._on_progress is not None:
            self._on_progress(self._progress)
        return done

    def _fail(self, prompt: _Prompt, error: Exception) -> None:
        """Gives a prompt up, with all its samples."""
        if self._on_failure is None or not isinstance(error, InputError):
            raise error
        prompt.failed = True
        self._abort([one for one in self._under_way if one.prompt is prompt])
        self._on_failure(prompt.place, error)

    def _stopped_by_text(self, one: _UnderWay, delta: TokenDelta) -> Completion | None:
        """Returns the completion if a stop string has ended it, which only the host can see."""
        if one.stream is None:
            return None
        one.stream.take(delta)
        return one.stream.completion if one.stream.finished else None

    def _finish(self, one: _UnderWay, completion: Completion) -> list[tuple[int, Completion]]:
        prompt = one.prompt
        prompt.samples[one.sample] = completion
        if len(prompt.samples) < prompt.params.n:
            return []
        first, *further = (prompt.samples[sample] for sample in sorted(prompt.samples))
        now = self._progress
        self._progress = dataclasses.replace(now, finished=now.finished + 1)
        return [(prompt.place, dataclasses.replace(first, further=tuple(further)))]

    def _count(self, one: _UnderWay, tokens: int, forwards: int, instances: int) -> None:
        """Updates progress with the counts of a sequence."""
        now = self._progress
        self._progress = dataclasses.replace(
            now,
            tokens=now.tokens + tokens - one.num_tokens,
            forwards=now.forwards + forwards - one.num_forwards,
            instances=now.instances + instances - one.num_token_instances,
        )
        one.num_tokens, one.num_forwards, one.num_token_instances = tokens, forwards, instances


def sample_params(params: SamplingParams) -> Iterator[SamplingParams]:
    """Yields the parameters of each of a prompt's ``n`` samples, as a request has them."""
    if params.n == 1:
        yield params
        return
    assert params.seed is not None, "drawn when the prompt was prepared"
    for sample in range(params.n):
        yield dataclasses.replace(params, n=1, seed=sample_seed(params.seed, sample))


class CompletionStream:
    """The completion of one sequence while it grows: events in, parts of its text out.

    Args:
      codec: the tokenizer; None where there is none.
      params: of the sequence; its stop strings are looked for here, since the engine knows token
        ids alone.
    """

    def __init__(self, codec: TextCodec | None, params: SamplingParams):
        self._codec, self._params = codec, params
        self._growing = None if codec is None else GrowingText(codec)
        self._stop = None
        if codec is not None and params.stop:
            self._stop = StopStrings(codec, params.stop, params.min_tokens)
        text = None if codec is None else ""
        self._so_far = dataclasses.replace(NOTHING, text=text)
        self._whole: Completion | None = None
        self._sent_tokens = self._sent_text = 0

    @property
    def finished(self) -> bool:
        """Whether the completion is whole. If it is so before the engine says it, a stop string has
        come, and the request is to be aborted."""
        return self._whole is not None

    @property
    def completion(self) -> Completion:
        """What has come so far."""
        return self._whole or self._so_far

    def take(self, event: TokenDelta | Finished) -> None:
        """Takes an event of the sequence in."""
        if self.finished:
            return
        if isinstance(event, Finished):
            self._whole = complete(self._codec, event.result, self._params)
            return
        before = self._so_far.text
        text = None if self._growing is None else self._growing.add(event.token_ids)
        self._so_far = now = extended(self._so_far, event, text)
        if text is None or before is None or self._stop is None:
            return
        if self._stop.stands_in(text, len(before)):
            found = complete(self._codec, now, self._params)
            self._whole = found if found.finish_reason is not None else None

    def piece(self) -> Chunk | None:
        """Returns what has come since the last piece and cannot change any more; None if there are
        no new tokens. The texts of all pieces together are the completion's."""
        completion = self.completion
        if len(completion.token_ids) == self._sent_tokens and not self.finished:
            return None
        text = completion.text or ""
        if self._stop is not None and not self.finished:
            text = text[: self._stop.safe_length(text)]
        new = completion.token_ids[self._sent_tokens :]
        chunk = Chunk(text[self._sent_text :], new, completion)
        self._sent_tokens = len(completion.token_ids)
        self._sent_text = max(len(text), self._sent_text)
        return chunk


NOTHING = Completion(None, [], None, 0, 0)
"""The completion of a sequence that has committed nothing yet."""


def extended(result: Completion, delta: TokenDelta, text: str | None) -> Completion:
    """Returns the completion with the tokens of an event appended, whose text is then ``text``."""
    logprobs = result.logprobs
    if delta.logprobs is not None:
        logprobs = [*(logprobs or []), *delta.logprobs]
    return dataclasses.replace(
        result,
        text=text,
        token_ids=result.token_ids + delta.token_ids,
        num_forwards=delta.num_forwards,
        num_token_instances=delta.num_token_instances,
        forwards_at=result.forwards_at + delta.forwards_at,
        instances_at=result.instances_at + delta.instances_at,
        drafts_at=result.drafts_at + delta.drafts_at,
        logprobs=logprobs,
        num_cached_tokens=delta.num_cached_tokens,
    )


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
