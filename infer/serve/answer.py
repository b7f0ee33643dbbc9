"""One call of the API on its way: its sequences' events, gathered as they come."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from infer.serve.capacity import Capacity
from infer.serve.engine_thread import EngineThread
from infer.serve.metrics import Metrics, SequenceTimes
from infer.trace import SequenceTrace
from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine.burst import Request
from wedlm_jax.engine.events import Event, Failed, TokenDelta, Traced
from wedlm_jax.generation import CompletionStream, Prepared, sample_params

if TYPE_CHECKING:
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import TextCodec


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked API call.

    Attributes:
      prompts: token ids and sampling of each, of which ``n`` samples are wanted.
      window: W of all; None lets the engine choose.
      streamed: whether pieces are wanted as they come.
      with_usage: whether a stream ends with its usage.
      with_token_ids: whether ids are sent beside texts.
      traced: whether every forward is reported.
    """

    prompts: Sequence[Prepared]
    window: int | None = None
    streamed: bool = False
    with_usage: bool = False
    with_token_ids: bool = False
    traced: bool = False

    @property
    def num_choices(self) -> int:
        return sum(params.n for _, params in self.prompts)


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of one choice: its index, the new tokens, and those of its trace."""

    index: int
    chunk: Chunk
    trace: dict[str, Any] | None = None


@dataclasses.dataclass(eq=False)
class _Choice:
    """A sequence under way.

    Attributes:
      watched: whether its text is followed token by token, for a stream or a stop string.
      trace: where it is asked for.
    """

    index: int
    watched: bool
    stream: CompletionStream
    times: SequenceTimes
    trace: SequenceTrace | None

    def news(self) -> Piece | None:
        """Returns what has come since the last time; None for nothing."""
        chunk = self.stream.piece()
        trace = None if self.trace is None else self.trace.news()
        if chunk is None and trace is not None:
            chunk = Chunk("", [], self.stream.completion)
        return None if chunk is None else Piece(self.index, chunk, trace)


class Answer:
    """Decodes what a call asks for.

    Args:
      codec: the tokenizer; None where there is none.
    """

    def __init__(
        self,
        call: Call,
        engine: EngineThread,
        codec: TextCodec | None,
        capacity: Capacity,
        metrics: Metrics,
    ):
        self._call, self._engine, self._codec = call, engine, codec
        self._capacity, self._metrics = capacity, metrics
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        self._under_way: dict[int, _Choice] = {}
        self._choices: list[_Choice] = []

    def begin(self) -> None:
        """Submits all sequences to the engine.

        Raises:
          ApiError: there is no room for them.
        """
        call = self._call
        self._capacity.enter(call.num_choices)
        requests = []
        for token_ids, params in call.prompts:
            for own in sample_params(params):
                number = self._engine.new_number()
                request = Request(number, token_ids, own, call.window, traced=call.traced)
                requests.append(request)
                choice = _Choice(
                    len(self._choices),
                    call.streamed or bool(own.stop),
                    CompletionStream(self._codec, own),
                    self._metrics.sequence(),
                    self._trace(own, len(token_ids)) if call.traced else None,
                )
                self._choices.append(choice)
                self._under_way[request.number] = choice
        self._engine.submit(requests, self._events.put_nowait)

    @property
    def is_over(self) -> bool:
        return not self._under_way

    def end(self) -> None:
        """Aborts what is still running and ends `pieces`; does nothing once all are finished."""
        numbers = list(self._under_way)
        if numbers:
            self._metrics.aborted.inc(len(numbers))
            self._engine.abort(numbers)
            self._capacity.leave(len(numbers))
            self._under_way.clear()
            self._events.put_nowait([])

    async def pieces(self, patience: float) -> AsyncIterator[list[Piece]]:
        """Yields what has come, once for every step of the engine that brought something; nothing
        at all after this many seconds without.

        Raises:
          Exception: what a sequence failed with.
        """
        while self._under_way:
            try:
                async with asyncio.timeout(patience):
                    events = await self._events.get()
            except TimeoutError:
                yield []
                continue
            news = (choice.news() for choice in self._take(events))
            yield [piece for piece in news if piece is not None]

    async def wholes(self) -> list[Piece]:
        """Waits for all choices, and returns each in one piece.

        Raises:
          Exception: what a sequence failed with.
        """
        while self._under_way:
            self._take(await self._events.get())
        pieces = []
        for choice in self._choices:
            one, trace = choice.stream.completion, choice.trace
            told = None if trace is None else trace.whole(one.finish_reason)
            pieces.append(Piece(choice.index, Chunk(one.text or "", one.token_ids, one), told))
        return pieces

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self._call.prompts)

    @property
    def so_far(self) -> list[Completion]:
        """Returns what has come of each choice."""
        return [choice.stream.completion for choice in self._choices]

    def _trace(self, params: SamplingParams, prompt_tokens: int) -> SequenceTrace:
        window = self._engine.window_size if self._call.window is None else self._call.window
        return SequenceTrace(
            self._codec, params, prompt_tokens, window if isinstance(window, int) else None
        )

    def _take(self, events: Sequence[Event]) -> list[_Choice]:
        touched: dict[int, _Choice] = {}
        for event in events:
            choice = self._under_way.get(event.number)
            if choice is None:
                continue
            if isinstance(event, Failed):
                self._over(event.number)
                raise event.error
            if isinstance(event, Traced):
                if choice.trace is not None:
                    choice.trace.take(event)
                touched[choice.index] = choice
                continue
            if isinstance(event, TokenDelta):
                choice.times.note(event)
                if not choice.watched:
                    continue
            choice.stream.take(event)
            touched[choice.index] = choice
            if choice.stream.finished:
                self._over(event.number)
                choice.times.end(choice.stream.completion)
                if isinstance(event, TokenDelta):
                    # A stop string, of which the engine knows nothing.
                    self._engine.abort([event.number])
        return list(touched.values())

    def _over(self, number: int) -> None:
        del self._under_way[number]
        self._capacity.leave(1)
