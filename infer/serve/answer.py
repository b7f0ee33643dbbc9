"""One call of the API on its way: its sequences' events, gathered as they come."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from infer.serve.capacity import Capacity
from infer.serve.metrics import Metrics, SequenceTimes
from infer.serve.served_engine import ServedEngine
from infer.trace import SequenceTrace
from wedlm_jax.completion import Chunk, Completion
from wedlm_jax.engine.interface import Event, Failed, Request, TokenDelta, Traced
from wedlm_jax.engine.loop import Caller
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
      is_over: whether nothing more comes of it.
    """

    number: int
    index: int
    watched: bool
    stream: CompletionStream
    times: SequenceTimes
    trace: SequenceTrace | None
    is_over: bool = False

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
      burst_seconds: of decoding between two looks at what came in, at most. Tokens of shorter
        bursts are delivered together, twice in that time at most, except where a stop string may
        stand in them or every forward is told.
    """

    def __init__(
        self,
        call: Call,
        engine: ServedEngine,
        codec: TextCodec | None,
        capacity: Capacity,
        metrics: Metrics,
        *,
        burst_seconds: float,
    ):
        self._call, self._engine, self._codec = call, engine, codec
        self._capacity, self._metrics = capacity, metrics
        self._events: asyncio.Queue[list[Event]] = asyncio.Queue()
        hurried = call.traced or any(params.stop for _, params in call.prompts)
        self._caller = Caller(
            self._events.put_nowait,
            seconds=burst_seconds,
            patience=0.0 if hurried else burst_seconds / 2,
        )
        self._choices: list[_Choice] = []
        self._num_under_way = 0

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
                choice = _Choice(
                    self._engine.new_number(),
                    len(self._choices),
                    call.streamed or bool(own.stop),
                    CompletionStream(self._codec, own),
                    self._metrics.sequence(),
                    self._trace(own, len(token_ids)) if call.traced else None,
                )
                self._choices.append(choice)
                request = Request(
                    choice.number,
                    token_ids,
                    own,
                    call.window,
                    traced=call.traced,
                    caller=self._caller,
                    owner=choice,
                )
                requests.append(request)
        self._num_under_way = len(requests)
        self._engine.submit(requests)

    @property
    def is_over(self) -> bool:
        return self._num_under_way == 0

    def end(self) -> None:
        """Aborts what is still running and ends `pieces`; does nothing once all are finished."""
        gone = [choice for choice in self._choices if not choice.is_over]
        if gone:
            self._metrics.aborted.inc(len(gone))
            self._engine.abort([choice.number for choice in gone])
            for choice in gone:
                self._over(choice)
            self._events.put_nowait([])

    async def pieces(self, patience: float) -> AsyncIterator[list[Piece]]:
        """Yields what has come, once for every step of the engine that brought something; nothing
        at all after this many seconds without.

        Raises:
          Exception: what a sequence failed with.
        """
        while not self.is_over:
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
        while not self.is_over:
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
        engine = self._engine.engine
        window = engine.window_size if self._call.window is None else self._call.window
        return SequenceTrace(
            self._codec, params, prompt_tokens, window if isinstance(window, int) else None
        )

    def _take(self, events: Sequence[Event]) -> list[_Choice]:
        touched: dict[int, _Choice] = {}
        for event in events:
            choice: _Choice = event.request.owner
            if choice.is_over:
                continue
            if isinstance(event, Failed):
                self._over(choice)
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
                self._over(choice)
                choice.times.end(choice.stream.completion)
                if isinstance(event, TokenDelta):
                    # A stop string, of which the engine knows nothing.
                    self._engine.abort([event.number])
        return list(touched.values())

    def _over(self, choice: _Choice) -> None:
        choice.is_over = True
        self._num_under_way -= 1
        self._capacity.leave(1)
