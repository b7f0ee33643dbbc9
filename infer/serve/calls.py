"""From the body of a request to what the engine decodes."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from infer.serve.answer import Call
from infer.serve.capacity import Capacity
from infer.serve.errors import CONTEXT_LENGTH, ApiError, bad_request
from infer.serve.fields import check_refused, name_given, sampling_given, sampling_of
from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError
from wedlm_jax.messages import checked_messages
from wedlm_jax.params import OPTIONS
from wedlm_jax.text import as_list

if TYPE_CHECKING:
    from wedlm_jax.generation import Prepared
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import Prompt

GRAMMAR_SECONDS = 10.0
"""In which a grammar is compiled, or refused."""

FIELDS = {*OPTIONS, "window_size", "tools", "chat_template_kwargs"}
"""With which the library's sentences may begin."""


class Calls:
    """Checks bodies, and turns their texts into token ids.

    Args:
      model: the name that requests know it by.
      defaults: default sampling options.
      chat_limit: completion tokens of a chat that says nothing of them; None for all that its
        prompt leaves of the context.
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
        # Tokenizers work through megabytes here while the event loop goes on. One at a time:
        # they are not said to be safe for several threads.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._compilers = ThreadPoolExecutor(2, thread_name_prefix="grammars")

    async def of_completion(self, body: Any) -> Call:
        """Reads the body of a request to /v1/completions.

        Raises:
          ApiError: naming the field.
        """
        prompts = as_list(body.prompt)
        if not prompts:
            raise ApiError(400, "prompt: expected at least one", param="prompt")
        return await self._call(body, "prompt", lambda: prompts, self._defaults.max_tokens)

    async def of_chat(self, body: Any) -> Call:
        """Reads the body of a request to /v1/chat/completions.

        Raises:
          ApiError: naming the field.
        """

        def read() -> list[Prompt]:
            prompt = self._llm.chat_prompt(
                checked_messages(body.messages),
                tools=None if body.tool_choice == "none" else body.tools,
                chat_template_kwargs=body.chat_template_kwargs,
            )
            return [prompt]

        return await self._call(body, "messages", read, self._chat_limit)

    async def _call(
        self, body: Any, name: str, read: Callable[[], Sequence[Prompt]], limit: int | None
    ) -> Call:
        try:
            return await self._checked(body, name, read, limit)
        except ApiError as error:
            error.param = name_given(body, error.param)
            raise

    async def _checked(
        self, body: Any, name: str, read: Callable[[], Sequence[Prompt]], limit: int | None
    ) -> Call:
        if body.model not in (None, self._model):
            message = f"there is no model {body.model!r} here, but {self._model!r}"
            raise ApiError(404, message, param="model", code="model_not_found")
        check_refused(body)
        if body.stream_options is not None and not body.stream:
            message = "stream_options: expected stream to be true"
            raise ApiError(400, message, param="stream_options")
        given = sampling_given(body)
        params = sampling_of(given, self._defaults, self._llm.engine.max_model_len)
        limit = params.max_tokens if "max_tokens" in given else limit
        exact = "max_tokens" in given
        if params.grammar is not None:
            await self._compile_grammar(params, name)

        def prepare() -> list[Prepared]:
            try:
                if body.window_size is not None:
                    self._llm.engine.check_window(body.window_size)
                prompts = read()
                self._capacity.check(len(prompts) * params.n)
                return [
                    self._prepared(prompt, params, limit, exact, body.window_size, name)
                    for prompt in prompts
                ]
            except InputError as error:
                raise bad_request(error, FIELDS, name) from None

        return Call(
            await asyncio.get_running_loop().run_in_executor(self._worker, prepare),
            body.window_size,
            streamed=bool(body.stream),
            with_usage=bool(body.stream_options and body.stream_options.include_usage),
            with_token_ids=bool(body.return_token_ids),
            traced=bool(body.return_trace),
        )

    async def _compile_grammar(self, params: SamplingParams, name: str) -> None:
        """Compiles a grammar in a thread of its own, so that no other request waits for it; the
        result is kept."""
        check = self._llm.engine.check_grammar
        try:
            async with asyncio.timeout(GRAMMAR_SECONDS):
                await asyncio.get_running_loop().run_in_executor(self._compilers, check, params)
        except InputError as error:
            raise bad_request(error, FIELDS, name) from None
        except TimeoutError:
            assert params.grammar is not None
            field = params.grammar[0]
            message = f"{field}: expected one that is compiled within {GRAMMAR_SECONDS:g} s"
            raise ApiError(400, message, param=field) from None

    def _prepared(
        self,
        prompt: Prompt,
        params: SamplingParams,
        limit: int | None,
        exact: bool,
        window: int | None,
        name: str,
    ) -> Prepared:
        ids = self._llm.as_ids(prompt)
        most = self._llm.engine.most_tokens(Request(-1, ids, params, window))
        if not exact:
            least = max(params.min_tokens, 1)
            limit = max(most if limit is None else min(most, limit), least)
            params = dataclasses.replace(params, max_tokens=limit)
        try:
            return self._llm.prepare_one(ids, params, many_samples=True)
        except InputError as error:
            if params.max_tokens <= most:
                raise
            # With fewer tokens the prompt would do, unless it leaves room for none.
            param = "max_tokens" if exact and most > 0 else name
            raise ApiError(400, str(error), param=param, code=CONTEXT_LENGTH) from None
