"""Prompts through `Engine.step`: submitted as there is room, gathered as they finish.

Here requests become completions: several samples of a prompt, stop strings, which only text can
tell, and where a call stands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from wedlm_jax.completion import Completion, Progress
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.engine import Engine
from wedlm_jax.engine.events import Event, Failed, Finished, TokenDelta
from wedlm_jax.engine.results import SequenceResult
from wedlm_jax.params import SamplingParams, sample_seed
from wedlm_jax.text import StopStrings, TextCodec

WAITING = 16
"""Requests that wait in the engine beside those that run: enough that none is late."""

Prepared: TypeAlias = tuple[Sequence[int], SamplingParams]
"""A checked prompt: its token ids, and how it is decoded."""


class Router:
    """An engine that several callers share: each gets the events of its own requests.

    Args:
      engine: which nobody else steps.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._kept: dict[int, list[Event]] = {}
        self._mine: dict[int, object] = {}
        self._last = -1

    def new_number(self, caller: object) -> int:
        """Names a request of ``caller``."""
        self._last += 1
        self._mine[self._last] = caller
        return self._last

    def step(
        self,
        caller: object,
        submitted: Sequence[Request] = (),
        aborted: Sequence[int] = (),
        *,
        max_forwards: int | None = None,
    ) -> list[Event]:
        """Steps the engine; returns the caller's events, those kept since its last step first."""
        for number in aborted:
            self._mine.pop(number, None)
        own: list[Event] = self._kept.pop(id(caller), [])
        for event in self.engine.step(submitted, aborted, max_forwards=max_forwards):
            whose = self._mine.get(event.number)
            if isinstance(event, Finished | Failed):
                self._mine.pop(event.number, None)
            if whose is caller:
                own.append(event)
            elif whose is not None:
                self._kept.setdefault(id(whose), []).append(event)
        return own

    def leave(self, caller: object, numbers: Sequence[int]) -> None:
        """Aborts what a caller has under way and forgets it."""
        self._kept.pop(id(caller), None)
        if numbers:
            self.step(caller, aborted=numbers)
            self._kept.pop(id(caller), None)


@dataclasses.dataclass(eq=False)
class _Prompt:
    """A prompt under way.

    Attributes:
      place: among all.
      num_submitted: of its samples.
      samples: those that are done, by their place.
    """

    place: int
    params: SamplingParams
    num_submitted: int = 0
    samples: dict[int, Completion] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(eq=False)
class _UnderWay:
    """A sequence under way, as its caller knows it.

    Attributes:
      result: what it has committed, kept where a stop string is looked for.
      begun: whether it has committed anything.
      num_tokens, num_forwards, num_token_instances: of it so far.
    """

    prompt: _Prompt
    sample: int
    result: SequenceResult
    begun: bool = False
    num_tokens: int = 0
    num_forwards: int = 0
    num_token_instances: int = 0


class Generation:
    """One call that decodes prompts: an iterator of completions, some at a time.

    Args:
      router: over the engine.
      codec: the tokenizer; None where there is none.
      prompts: read as they are needed.
      total: how many, where that is known; for progress.
      on_progress: told between bursts.
      stopping: once it says so, prompts that have tokens already are finished and no others
        begun.
    """

    def __init__(
        self,
        router: Router,
        codec: TextCodec | None,
        prompts: Iterable[Prepared],
        *,
        total: int | None = None,
        on_progress: Callable[[Progress], None] | None = None,
        stopping: Callable[[], bool] | None = None,
    ):
        self._router, self._codec = router, codec
        self._requests = self._as_requests(prompts)
        self._on_progress, self._stopping = on_progress, stopping or (lambda: False)
        self._under_way: dict[int, _UnderWay] = {}
        self._aborted: list[int] = []
        self._progress = Progress(0, total, 0, 0, 0)
        self._room = router.engine.settings.sequences + WAITING

    def __iter__(self) -> Iterator[list[tuple[int, Completion]]]:
        """Yields the places of prompts that are done, and what became of them."""
        try:
            while True:
                submitted = self._submit()
                if not self._under_way:
                    return
                aborted, self._aborted = self._aborted, []
                events = self._router.step(self, submitted, aborted)
                if done := self._take(events):
                    yield done
        finally:
            self._router.leave(self, [*self._under_way, *self._aborted])

    def _as_requests(self, prompts: Iterable[Prepared]) -> Iterator[tuple[Request, _UnderWay]]:
        for place, (token_ids, params) in enumerate(prompts):
            prompt = _Prompt(place, params)
            for sample in range(params.n):
                own = params
                if params.n > 1:
                    assert params.seed is not None, "drawn when the prompt was prepared"
                    seed = sample_seed(params.seed, sample)
                    own = dataclasses.replace(params, n=1, seed=seed)
                number = self._router.new_number(self)
                yield Request(number, token_ids, own), _UnderWay(prompt, sample, NOTHING)

    def _submit(self) -> list[Request]:
        submitted: list[Request] = []
        if self._stopping():
            self._drop_what_is_not_finished()
            return submitted
        while len(self._under_way) < self._room:
            following = next(self._requests, None)
            if following is None:
                break
            request, under_way = following
            self._under_way[request.number] = under_way
            under_way.prompt.num_submitted += 1
            submitted.append(request)
        return submitted

    def _drop_what_is_not_finished(self) -> None:
        """Aborts, once no more are begun, prompts without tokens, and those of which samples were
        never submitted: they would come to nothing."""
        begun = {id(one.prompt) for one in self._under_way.values() if one.begun}
        for number, one in list(self._under_way.items()):
            prompt = one.prompt
            has_tokens = id(prompt) in begun or prompt.samples
            if not has_tokens or prompt.num_submitted < prompt.params.n:
                del self._under_way[number]
                self._aborted.append(number)

    def _take(self, events: Sequence[Event]) -> list[tuple[int, Completion]]:
        done: list[tuple[int, Completion]] = []
        for event in events:
            one = self._under_way.get(event.number)
            if one is None:
                continue
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, TokenDelta):
                one.begun = True
                self._count(one, event.num_output, event.num_forwards, event.num_token_instances)
                completion = self._stopped_by_text(one, event)
                if completion is None:
                    continue
                self._aborted.append(event.number)
            else:
                completion = complete(self._codec, event.result, one.prompt.params)
            del self._under_way[event.number]
            # A stop string cuts what was committed behind it in the same forwards.
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

    def _stopped_by_text(self, one: _UnderWay, delta: TokenDelta) -> Completion | None:
        """The completion, if a stop string has come, which only the host can see."""
        if not one.prompt.params.stop:
            return None
        one.result = extended(one.result, delta)
        completion = complete(self._codec, one.result, one.prompt.params)
        return None if completion.finish_reason is None else completion

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
        """Notes where a sequence stands now."""
        now = self._progress
        self._progress = dataclasses.replace(
            now,
            tokens=now.tokens + tokens - one.num_tokens,
            forwards=now.forwards + forwards - one.num_forwards,
            instances=now.instances + instances - one.num_token_instances,
        )
        one.num_tokens, one.num_forwards, one.num_token_instances = tokens, forwards, instances


NOTHING = SequenceResult([], None, 0, 0, [], [])
"""Of a sequence that has committed nothing yet."""


def extended(result: SequenceResult, delta: TokenDelta) -> SequenceResult:
    """The result with the tokens of an event behind it."""
    logprobs = result.logprobs
    if delta.logprobs is not None:
        logprobs = [*(logprobs or []), *delta.logprobs]
    return dataclasses.replace(
        result,
        token_ids=result.token_ids + delta.token_ids,
        num_forwards=delta.num_forwards,
        num_token_instances=delta.num_token_instances,
        forwards_at=result.forwards_at + delta.forwards_at,
        instances_at=result.instances_at + delta.instances_at,
        logprobs=logprobs,
    )


def complete(codec: TextCodec | None, result: SequenceResult, params: SamplingParams) -> Completion:
    """A sequence's result with its text, cut at the first stop string."""
    text = None
    if codec is not None:
        ids = result.token_ids[:-1] if result.finish_reason == "stop" else result.token_ids
        text = codec.complete_text(ids)
        if params.stop:
            found = StopStrings(codec, params.stop, params.min_tokens).find(ids)
            if found is not None:
                length, text = found
                result = result.cut(length)
    return Completion(
        text,
        result.token_ids,
        result.finish_reason,
        result.num_forwards,
        result.num_token_instances,
        result.logprobs,
        num_cached_tokens=result.num_cached_tokens,
    )
