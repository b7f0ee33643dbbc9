"""A conversation with a model, whose history stays in the prefix cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from wedlm_jax.engine.burst import Request
from wedlm_jax.errors import InputError

if TYPE_CHECKING:
    from wedlm_jax.completion import Chunk, Completion
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams

Message = dict[str, str]


@dataclasses.dataclass(frozen=True)
class _Past:
    """Holds the tokens of the conversation that the prefix cache may have.

    Attributes:
      token_ids: of prompt and answer, as the model saw and chose them.
      text: the same, as the chat template has it, up to the end of the answer.
    """

    token_ids: list[int]
    text: str


class Conversation:
    """Messages and answers, one after the other.

    Args:
      params: of all answers. Their ``max_tokens`` count only where ``limited``.
      limited: whether an answer may be no longer than that; else it may fill the context.
      system: the system's message; empty for none.

    Attributes:
      window: W of the next answer; None is the engine's.

    Raises:
      InputError: there is no tokenizer.
    """

    def __init__(
        self, llm: LLM, params: SamplingParams, *, limited: bool = False, system: str = ""
    ):
        if llm.codec is None:
            raise InputError(f"{llm.folder} has no tokenizer, without which nobody can talk to it")
        self._llm, self._codec = llm, llm.codec
        self.params, self._limited = params, limited
        self.system = system
        self.window: int | None = None
        self._messages: list[Message] = []
        self._past: _Past | None = None

    @property
    def has_template(self) -> bool:
        """Whether the model knows conversations; one that does not completes each message."""
        return self._codec.has_chat_template

    @property
    def has_to_compile(self) -> bool:
        """Whether the next answer waits until its program is compiled."""
        engine = self._llm.engine
        traits = engine.traits_of(Request(-1, (), self.params, self.window))
        return engine.compiled_for(traits) is None

    def reset(self) -> None:
        """Forgets all messages but the system's."""
        self._messages, self._past = [], None

    def answer(self, message: str, stopping: Callable[[], bool] | None = None) -> Iterator[Chunk]:
        """Answers a message as `wedlm_jax.llm.LLM.stream` does. If the caller stops early, or
        ``stopping`` says so, the conversation goes on from what has come.

        Raises:
          InputError: the message does not fit; the conversation is as it was.
        """
        if not self.has_template:
            prompt = list(self._llm.as_ids(message))
            yield from self._stream(prompt, stopping)
            return
        asked = [*self._messages, {"role": "user", "content": message}]
        text = self._rendered(asked)
        prompt = self._encoded(text)
        completion = None
        try:
            for chunk in self._stream(prompt, stopping):
                completion = chunk.completion
                yield chunk
        finally:
            if completion is not None:
                self._remember(asked, text, prompt, completion)

    def _stream(self, prompt: list[int], stopping: Callable[[], bool] | None) -> Iterator[Chunk]:
        params = self.params
        room = self._llm.engine.most_tokens(Request(-1, prompt, params, self.window))
        if room < 1:
            raise InputError(
                f"{len(prompt)} tokens leave no room for an answer in "
                f"{self._llm.engine.max_model_len}; /reset begins anew"
            )
        longest = min(room, params.max_tokens) if self._limited else room
        params = dataclasses.replace(params, max_tokens=max(longest, params.min_tokens))
        yield from self._llm.stream(prompt, params, window=self.window, stopping=stopping)

    def _rendered(self, messages: list[Message]) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._codec.render_prompt([*system, *messages])

    def _encoded(self, text: str) -> list[int]:
        """Encodes a prompt, but keeps the tokens of the past as they were, so that the prefix cache
        has them: encoding the text of an answer anew may give other tokens than the model chose."""
        past = self._past
        if past is None or not text.startswith(past.text):
            return self._codec.encode_rendered(text)
        return [*past.token_ids, *self._codec.encode_rendered(text[len(past.text) :])]

    def _remember(
        self, asked: list[Message], text: str, prompt: list[int], completion: Completion
    ) -> None:
        answer = completion.text or ""
        ids = completion.token_ids
        if completion.finish_reason == "stop":
            ids = ids[:-1]  # the template writes the end of an answer itself
        self._messages = [*asked, {"role": "assistant", "content": answer}]
        whole = self._codec.complete_text(ids) == answer  # else a stop string cut it
        self._past = _Past([*prompt, *ids], text + answer) if whole else None
