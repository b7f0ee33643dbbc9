"""Records in the form of OpenAI's batch files: a request to the API within an envelope, answered in
the same form.

    {"custom_id": "q-17", "method": "POST", "url": "/v1/chat/completions", "body": {...}}

The body is what `wedlm serve` takes, checked by the same code, and the answer is what it sends.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from typing import TYPE_CHECKING, Any

from infer.job.prompt_record import ENVELOPE, PromptRecord, record_seed
from wedlm_jax.errors import InputError
from wedlm_jax.messages import checked_messages, template_variables
from wedlm_jax.records.fields import refuse_unknown, shown_value

if TYPE_CHECKING:
    from collections.abc import Mapping

    from infer.serve.logprob_shapes import LogprobShapes
    from infer.serve.shapes import TextShape
    from wedlm_jax.completion import Completion
    from wedlm_jax.generation import Prepared, Windowed
    from wedlm_jax.llm import LLM
    from wedlm_jax.params import SamplingParams
    from wedlm_jax.text import TextCodec

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

NEEDED = "records of OpenAI's batch form need parts of the server: pip install 'wedlm-jax[serve]'"


NOT_IN_JOBS = ("stream", "stream_options", "return_trace")
"""Request fields that a job ignores, because its own options decide them."""


@dataclasses.dataclass
class BatchRecord:
    """A request in its envelope, and the form of its answer.

    Attributes:
      fields: of the envelope.
      shape: of an answer; known once the request has been prepared.
    """

    fields: Mapping[str, Any]
    shape: TextShape | None = None

    def checked(self, params: SamplingParams) -> PromptRecord:
        """Checks the request, as `infer.job.prompt_record.checked_record` does a record.

        Args:
          params: of what the body does not say; the seed is the job's.

        Raises:
          InputError: which field is wrong, and what was expected.
        """
        refuse_unknown(self.fields, ENVELOPE, "key")
        method, url = self.fields.get("method", "POST"), self.fields.get("url")
        if method != "POST":
            raise InputError(f"method: expected POST, not {shown_value(method)}")
        if url not in (CHAT, TEXT):
            raise InputError(f"url: expected {CHAT} or {TEXT}, not {shown_value(url)}")
        name = self.fields["custom_id"]
        if params.seed is not None:
            params = dataclasses.replace(params, seed=record_seed(params.seed, name))
        body, params = _read_body(self.fields.get("body"), url == CHAT, params)
        if url == CHAT:
            tools = None if body.tool_choice == "none" else body.tools
            template = {"tools": tools, "chat_template_kwargs": body.chat_template_kwargs}
            template_variables(tools=tools, kwargs=body.chat_template_kwargs)
            return PromptRecord(name, "messages", body.messages, params, body.window_size, template)
        prompt = body.prompt
        if isinstance(prompt, list) and not all(isinstance(one, int) for one in prompt):
            if len(prompt) != 1:
                raise InputError(f"prompt: expected one in a record, not {len(prompt)}")
            prompt = prompt[0]
        kind = "text" if isinstance(prompt, str) else "prompt_token_ids"
        return PromptRecord(name, kind, prompt, params, body.window_size)

    def prepared(self, llm: LLM, prompt: Prepared | Windowed) -> None:
        """Notes what an answer needs to know of the prompt and the model."""
        from infer.serve.answer import Call
        from infer.serve.shapes import ChatShape, TextShape

        token_ids, params = prompt[:2]
        body = self.fields["body"]
        with_ids = bool(body.get("return_token_ids"))
        call = Call([(range(len(token_ids)), params)], with_token_ids=with_ids)
        kind = ChatShape if self.fields["url"] == CHAT else TextShape
        # Nothing of an answer may depend on when it was given: a restart gives the same.
        self.shape = kind(
            call,
            body.get("model") or llm.folder.name,
            _logprob_shapes(llm.codec),
            identity=(self._id, 0),
        )

    def result(self, completion: Completion) -> dict[str, Any]:
        """Returns the answer in its envelope."""
        from infer.serve.answer import Piece
        from wedlm_jax.completion import Chunk

        assert self.shape is not None, "it was prepared"
        # What was in the cache depends on what else was decoded, which a restart changes, too.
        samples = [dataclasses.replace(one, num_cached_tokens=0) for one in completion.samples]
        pieces = [
            Piece(i, Chunk(one.text or "", one.token_ids, one)) for i, one in enumerate(samples)
        ]
        return self._answered(200, self.shape.whole(pieces))

    def error(self, reason: str) -> dict[str, Any]:
        """Returns what says in the answer's place why there is none."""
        said = {"message": reason, "type": "invalid_request_error", "param": None, "code": None}
        return self._answered(400, {"error": said})

    def _answered(self, status: int, body: dict[str, Any]) -> dict[str, Any]:
        response = {"status_code": status, "request_id": self._id, "body": body}
        ids = {"id": f"batch_req_{self._id}", "custom_id": self.fields["custom_id"]}
        return {**ids, "response": response, "error": None}

    @property
    def _id(self) -> str:
        text = json.dumps(self.fields["custom_id"], default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


@functools.lru_cache(maxsize=1)
def _logprob_shapes(codec: TextCodec | None) -> LogprobShapes:
    from infer.serve.logprob_shapes import LogprobShapes

    return LogprobShapes(codec)


def _read_body(given: Any, chat: bool, params: SamplingParams) -> tuple[Any, SamplingParams]:
    """Returns a body as the server reads it, and its sampling.

    Raises:
      InputError: what the server would say of it.
    """
    if not isinstance(given, dict):
        raise InputError(f"body: expected an object, not {shown_value(given)}")
    try:
        from pydantic import ValidationError

        from infer.serve.errors import ApiError
        from infer.serve.fields import (
            ChatRequest,
            CompletionRequest,
            check_refused,
            sampling_given,
            sampling_of,
        )
        from infer.serve.validation import error_of_fields
    except ImportError as error:
        raise InputError(f"{NEEDED} ({error})") from None
    for name in NOT_IN_JOBS:
        if given.get(name):
            raise InputError(f"{name}: not in a job, whose options say how it decodes")
    try:
        body: Any = (ChatRequest if chat else CompletionRequest).model_validate(given)
        check_refused(body)
        if chat:
            body.messages = checked_messages(body.messages)
        sampling = sampling_given(body)
        if sampling.get("seed", 0) in (None, -1):
            del sampling["seed"]
        sampling = {"max_tokens": params.max_tokens} | sampling
        return body, sampling_of(sampling, params, params.max_tokens)
    except ValidationError as error:
        raise InputError(error_of_fields(error.errors(), "").message) from None
    except ApiError as error:
        raise InputError(error.message) from None
