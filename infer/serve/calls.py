"""Turns a request's body into a call: checks and tokenizes it, and refuses it if there is no
room."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from infer.serve.errors import CONTEXT_LENGTH, ApiError, bad_field, bad_request
from infer.serve.fields import ChatRequest, check_refused, name_given, sampling_given, sampling_of
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError
from wedlm_jax.params import OPTIONS
from wedlm_jax.text import as_list

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import Prompt

GRAMMAR_SECONDS = 10.0
"""Maximum time that compiling a grammar may take."""

LONGEST_RETRY = 60
"""Maximum number of seconds that a caller is asked to wait."""

FIELDS = {*OPTIONS, "window_size", "tools", "chat_template_kwargs"}
"""Fields whose names the library's messages may begin with."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A checked API call.

    Attributes:
      prompts: each prompt's token ids and sampling parameters, with ``n``.
      window: W; None lets the engine choose.
      streamed: whether the answer is a stream.
      with_usage: whether a stream ends with its token usage.
      with_token_ids: whether token ids are sent along with texts.
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

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(token_ids) for token_ids, _ in self.prompts)


class Capacity:
    """Limits the number of open sequences: ``running`` decode together, and ``queued`` wait."""

    def __init__(self, running: int, queued: int):
        self._most = running + queued
        self._open = 0
        self._ends: collections.deque[float] = collections.deque(maxlen=64)

    def check(self, count: int) -> None:
        """Raises an `ApiError` with status 400 for more sequences than could ever be open."""
        if count > self._most:
            raise ApiError(
                400, f"{count} completions are requested; this server takes {self._most} at most"
            )

    def enter(self, count: int) -> None:
        """Opens sequences, or raises an `ApiError` (429, with Retry-After) if not all fit now."""
        excess = self._open + count - self._most
        if excess > 0:
            seconds = self._seconds_until(excess)
            raise ApiError(
                429,
                f"the server and its queue are full; try again in {seconds} s",
                code="queue_full",
                headers={"Retry-After": str(seconds)},
            )
        self._open += count

    def leave(self, count: int) -> None:
        """Closes sequences."""
        self._open -= count
        self._ends.extend([time.monotonic()] * count)

    def _seconds_until(self, excess: int) -> int:
        """Estimates the seconds until this many sequences will have ended, from the recent rate."""
        if len(self._ends) < 2:
            return 1
        passed = time.monotonic() - self._ends[0]
        return max(1, min(LONGEST_RETRY, math.ceil(excess * passed / len(self._ends))))


class Calls:
    """Checks bodies and turns their texts into token ids.

    Args:
      model: the model's name in the API.
      defaults: default sampling parameters.
      chat_limit: default ``max_tokens`` of chats; None for as many as the prompt leaves room for.
    """

    def __init__(
        self,
        llm: LLM,
        model: str,
        defaults: SamplingParams,
        capacity: Capacity,
        chat_limit: int | None = None,
    ):
        self._llm, self._model, self._defaults = llm, model, defaults
        self._capacity, self._chat_limit = capacity, chat_limit
        # Tokenizing megabytes must not block the event loop. One thread, as tokenizers need not be
        # thread-safe.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammars")

    def check_model(self, name: str) -> None:
        """Raises an `ApiError` if a model is not the one that is served."""
        if name != self._model:
            message = f"there is no model {name!r} here, only {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def read(self, body: Any) -> Call:
        """Returns the call for a body, a `CompletionRequest` or a `ChatRequest`. Raises `ApiError`,
        which names the field, if one is bad."""
        try:
            return await self._read(body)
        except InputError as error:
            refused = bad_request(error, FIELDS, _prompt_field(body))
        except ApiError as error:
            refused = error
        refused.param = name_given(body, refused.param)
        raise refused from None

    async def _read(self, body: Any) -> Call:
        if getattr(body, "prompt", None) == []:
            raise bad_field("prompt", "expected at least one")
        if body.model is not None:
            self.check_model(body.model)
        check_refused(body)
        if body.stream_options is not None and not body.stream:
            raise bad_field("stream_options", "expected stream to be true")
        given = sampling_given(body)
        params = sampling_of(given, self._defaults, self._llm.engine.max_model_len)
        if params.grammar is not None:
            await self._compile_grammar(params)
        prompts = await asyncio.get_running_loop().run_in_executor(
            self._worker, self._prepare, body, params, "max_tokens" in given
        )
        return Call(
            prompts,
            body.window_size,
            streamed=bool(body.stream),
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_token_ids=bool(body.return_token_ids),
            traced=bool(body.return_trace),
        )

    async def _compile_grammar(self, params: SamplingParams) -> None:
        """Compiles a grammar, which the engine keeps, in a thread, while other requests go on."""
        assert params.grammar is not None
        check = self._llm.engine.check_grammar
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._compilers, check, params)
        except TimeoutError:
            message = f"expected one that compiles within {GRAMMAR_SECONDS:g} s"
            raise bad_field(params.grammar[0], message) from None

    def _prepare(self, body: Any, params: SamplingParams, exact: bool) -> list[Prepared]:
        """Tokenizes the prompts of a body.

        Args:
          exact: whether the body gives ``max_tokens``; otherwise it is as many as fit into the
            context, up to the default.
        """
        if body.window_size is not None:
            self._llm.engine.check_window(body.window_size)
        if isinstance(body, ChatRequest):
            chat: Any = body
            prompts: list[Prompt] = [
                self._llm.chat_prompt(
                    chat.messages,
                    tools=None if chat.tool_choice == "none" else chat.tools,
                    chat_template_kwargs=chat.chat_template_kwargs,
                )
            ]
            limit = self._chat_limit
        else:
            prompts, limit = as_list(body.prompt), self._defaults.max_tokens
        self._capacity.check(len(prompts) * params.n)

        def prepared(prompt: Prompt) -> Prepared:
            ids, fitting = self._llm.as_ids(prompt), params
            most = self._llm.engine.most_tokens(Request(-1, ids, params, body.window_size))
            if not exact:
                tokens = most if limit is None else min(most, limit)
                fitting = dataclasses.replace(params, max_tokens=max(tokens, params.min_tokens, 1))
            try:
                return self._llm.prepare_one(ids, fitting, many_samples=True)
            except InputError as error:
                if fitting.max_tokens <= most:
                    raise
                # A smaller max_tokens would fit, unless the prompt leaves no room at all.
                param = "max_tokens" if exact and most > 0 else _prompt_field(body)
                raise ApiError(400, str(error), param=param, code=CONTEXT_LENGTH) from None

        return [prepared(prompt) for prompt in prompts]


def _prompt_field(body: Any) -> str:
    return "messages" if isinstance(body, ChatRequest) else "prompt"
