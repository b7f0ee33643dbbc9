"""A conversation with a model, whose history stays in the prefix cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from wedlm_jax.engine.interface import Request
from wedlm_jax.errors import InputError, counted

if TYPE_CHECKING:
    from wedlm_jax.completion import Chunk, Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

Message = dict[str, str]


class Conversation:
    """Messages and answers, one after the other.

    Args:
      params: sampling parameters of all answers.
      limited: whether their ``max_tokens`` limits an answer; otherwise it may fill the context.
      system: the system message; empty for none.
      tell: called once, with a sentence, when the oldest messages leave a full context.

    Attributes:
      window: W of the next answer; None for the engine's.

    Raises:
      InputError: there is no tokenizer.
    """

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        *,
        limited: bool = False,
        system: str = "",
        tell: Callable[[str], None] = lambda _: None,
    ):
        if llm.codec is None:
            raise InputError(f"{llm.name} has no tokenizer, which a chat needs")
        self._llm, self._codec = llm, llm.codec
        self.params, self._limited = params, limited
        self.system = system
        self.window: int | None = None
        self._messages: list[Message] = []
        # Prompt and answer as the chat template renders them, and their tokens, for the cache.
        self._past: tuple[str, list[int]] | None = None
        self._last: str | None = None
        self._tell, self._has_told, self._has_advised = tell, False, False

    @property
    def messages(self) -> list[Message]:
        """All messages that are still in the context, the system message first."""
        return self._with_system(self._messages)

    @property
    def has_template(self) -> bool:
        """Whether the model has a chat template; one without completes each message."""
        return self._codec.has_chat_template

    def reset(self) -> None:
        """Forgets all messages but the system message."""
        self._messages, self._past, self._last = [], None, None

    def retry(self, stopping: Callable[[], bool] | None = None) -> Iterator[Chunk]:
        """Answers the last message again, with another seed, and replaces its answer; if nothing
        comes, the old answer stays.

        Raises:
          InputError: nothing has been answered yet.
        """
        if self._last is None:
            raise InputError("/retry: there is no answer yet")
        before = self._messages, self._past
        self._messages = self._messages[:-2]
        if self.params.seed is not None:
            seed = (self.params.seed + 1) % 2**32
            self.params = dataclasses.replace(self.params, seed=seed)
        came = False
        try:
            for chunk in self.answer(self._last, stopping):
                came = True
                yield chunk
        finally:
            if not came:
                self._messages, self._past = before

    def answer(self, message: str, stopping: Callable[[], bool] | None = None) -> Iterator[Chunk]:
        """Answers a message as `wedlm_jax.llm.LLM.stream` does. If the caller stops early, or
        ``stopping`` returns true, the conversation continues from the text so far.

        Raises:
          InputError: the message does not fit; the conversation is unchanged.
        """
        if not self.has_template:
            prompt = list(self._llm.as_ids(message))
            self._last = message
            yield from self._stream(prompt, stopping)
            return
        asked, text, prompt = self._fitting([*self._messages, {"role": "user", "content": message}])
        completion = None
        try:
            for chunk in self._stream(prompt, stopping):
                completion = chunk.completion
                yield chunk
        finally:
            if completion is not None:
                self._last = message
                self._remember(asked, text, prompt, completion)

    def advice(self, completion: Completion) -> str | None:
        """Returns a hint, once, for greedy answers that repeat themselves endlessly: after one that
        filled the context or was stopped."""
        filled = completion.finish_reason == "length" and not self._limited
        endless = filled or completion.finish_reason is None
        if self._has_advised or not endless or self.params.temperature > 0:
            return None
        self._has_advised = True
        begin = "the answer ran to the end of the context; " if filled else ""
        return f"{begin}if answers repeat themselves, /reset and try /temperature 0.7"

    def _fitting(self, messages: list[Message]) -> tuple[list[Message], str, list[int]]:
        """Returns messages that leave room for an answer, their text, and its tokens. If there is
        no room, drops the oldest turns until a quarter of the context is free: dropping one turn
        per message would recompute all that stays each time."""
        whole = self._llm.engine.max_model_len
        room, asked = min(self.params.max_tokens, whole // 4), messages
        while True:
            text = self._rendered(asked)
            prompt = self._encoded(text)
            if len(asked) == 1 or self._room(prompt) >= room:
                break
            asked, room = asked[2:], whole // 4
        if len(asked) < len(messages) and not self._has_told:
            self._has_told = True
            self._tell(
                f"the context of {counted(whole, 'token')} is full: from now on the oldest messages"
                " are dropped, and the model no longer sees them"
            )
        return asked, text, prompt

    def _room(self, prompt: list[int]) -> int:
        return self._llm.engine.most_tokens(Request(-1, prompt, self.params, self.window))

    def _stream(self, prompt: list[int], stopping: Callable[[], bool] | None) -> Iterator[Chunk]:
        params = self.params
        room = self._room(prompt)
        if room < 1:
            raise InputError(
                f"{counted(len(prompt), 'token')} leave no room for an answer in a context of "
                f"{self._llm.engine.max_model_len:,}"
            )
        longest = min(room, params.max_tokens) if self._limited else room
        params = dataclasses.replace(params, max_tokens=max(longest, params.min_tokens))
        yield from self._llm.stream(prompt, params, window=self.window, stopping=stopping)

    def _rendered(self, messages: list[Message]) -> str:
        return self._codec.render_prompt(self._with_system(messages))

    def _with_system(self, messages: list[Message]) -> list[Message]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *messages]

    def _encoded(self, text: str) -> list[int]:
        """Encodes a prompt but keeps the tokens of earlier turns, which are in the prefix cache:
        re-encoding the text of an answer may give other tokens than the model chose."""
        before, token_ids = self._past or ("", [])
        if not text.startswith(before):
            return self._codec.encode_rendered(text)
        return [*token_ids, *self._codec.encode_rendered(text[len(before) :])]

    def _remember(
        self, asked: list[Message], text: str, prompt: list[int], completion: Completion
    ) -> None:
        answer = completion.text or ""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]  # the template writes the end of an answer itself
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        whole = self._codec.complete_text(ids) == answer  # else a stop string cut it
        self._past = (text + answer, [*prompt, *ids]) if whole else None
