"""Converts text to tokens and back: prompts, chat templates, growing texts, stop strings."""

from __future__ import annotations

import bisect
import contextlib
import functools
import importlib
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from wedlm_jax.config import read_object
from wedlm_jax.errors import InputError, errors_at, shortened
from wedlm_jax.messages import checked_messages
from wedlm_jax.params import SamplingParams
from wedlm_jax.typed_tokens import MARK, TypedTokens

INCOMPLETE = "\ufffd"
"""The character to which tokenizers decode the incomplete bytes of a character."""


def _bytes_by_letter() -> dict[str, int]:
    """Returns the byte that each letter of byte-level BPE stands for. Printable bytes stand for
    themselves; the others have letters from U+0100 on, in order."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    letters = {chr(byte): byte for byte in shown}
    return letters | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


BYTES = _bytes_by_letter()

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of one byte, in vocabularies with byte fallback."""

SETTLED_BEHIND = 32
"""How many of the last tokens of a growing text are decoded again together with later ones."""

NO_LIMIT = 10**30
"""The value that transformers uses for a tokenizer without a maximal length."""

Messages = Sequence[dict[str, Any]]
Prompt = str | Sequence[int]

CHANGED = (
    "they contain special tokens, which this chat template alters, so that they cannot be "
    "distinguished from its own; remove them"
)


class TextCodec:
    """A checkpoint's tokenizer and chat template.

    Attributes:
      tokenizer: a tokenizer of `transformers`.
      variables: variables of the chat template, for conversations that do not set them.
      trust_special_tokens: whether special tokens in messages are read as such, not as text
        (`wedlm_jax.typed_tokens`).
    """

    def __init__(
        self,
        tokenizer: Any,
        variables: Mapping[str, Any] | None = None,
        trust_special_tokens: bool = False,
    ):
        self.tokenizer, self.variables = tokenizer, variables or {}
        self.trust_special_tokens = trust_special_tokens
        self._typed = TypedTokens(tokenizer)
        self._incomplete_ids = self.encode(INCOMPLETE, special_tokens=False)

    @classmethod
    def load(
        cls,
        folder: Path,
        *,
        variables: Mapping[str, Any] | None = None,
        trust_special_tokens: bool = False,
    ) -> TextCodec | None:
        """Loads the tokenizer in ``folder``; returns None if it has none.

        Raises:
          InputError: a file is truncated or malformed; the message names it.
        """
        fast = folder / "tokenizer.json"
        if not fast.exists() and not (folder / "vocab.json").exists():
            return None
        read_object(folder / "tokenizer_config.json")  # transformers would not name the file
        with _quiet_transformers():
            from transformers import AutoTokenizer, PreTrainedTokenizerFast

            # tokenizer.json is self-contained. Without it, transformers infers the class from
            # config.json, but does not know every model_type.
            kind = PreTrainedTokenizerFast if fast.exists() else AutoTokenizer
            try:
                # The engine checks lengths, against the model instead of the tokenizer.
                tokenizer = kind.from_pretrained(str(folder), model_max_length=NO_LIMIT)
            except Exception as error:
                # The parser of tokenizer.json raises a bare Exception.
                name = fast if fast.exists() else folder
                raise InputError(
                    f"{name}: the tokenizer is truncated or malformed ({shortened(str(error))})"
                ) from None
        return cls(tokenizer, variables, trust_special_tokens)

    @property
    def eos_token_id(self) -> int | None:
        token = self.tokenizer.eos_token_id
        return None if token is None else int(token)

    @functools.cached_property
    def token_ids(self) -> frozenset[int]:
        """The ids that the tokenizer knows; a model may have rows for more."""
        return frozenset(self.tokenizer.get_vocab().values())

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def chat_end(self) -> str | None:
        """The token that ends both a turn of the chat template and a completion, as in instruction-
        tuned models; None if there is no such token."""
        eos, template = self.tokenizer.eos_token, getattr(self.tokenizer, "chat_template", None)
        return str(eos) if eos and template and str(eos) in str(template) else None

    def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, by default with the special tokens that the tokenizer
        adds; refuses, with an `InputError`, what is not valid Unicode."""
        _check_unicode(text)
        return list(self.tokenizer(text, add_special_tokens=special_tokens)["input_ids"])

    def encode_rendered(self, text: str) -> list[int]:
        """Returns the token ids, as `encode` does, of a text from `render_chat` or `render_prompt`,
        or of a part of it; no special tokens are added, since templates write them."""
        if MARK in text and not self.trust_special_tokens:
            _check_unicode(text)
            return self._typed.encode(text)
        return self.encode(text, special_tokens=False)

    def spellings(self, text: str) -> list[tuple[int, ...]]:
        """Returns the token ids of a word at the start of a text, and after a space."""
        forms = (text.lstrip(), f" {text.lstrip()}")
        found = (tuple(self.encode(form, special_tokens=False)) for form in forms)
        return list(dict.fromkeys(filter(None, found)))

    def encode_chat(
        self, messages: Messages, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Encodes a conversation, as `wedlm_jax.messages.checked_messages` takes it, with the chat
        template, ready for the assistant's turn. ``variables`` of the template, such as ``tools``,
        override this object's.

        Raises:
          InputError: the tokenizer has no template, or the messages do not fit it.
        """
        return self.encode_rendered(self.render_prompt(checked_messages(messages), variables))

    def marked(self, value: Any) -> Any:
        """Returns messages or variables with the special tokens in their texts marked as text, for
        `encode_rendered`, unless they are trusted."""
        return value if self.trust_special_tokens else self._typed.marked(value)

    def render_prompt(self, messages: Messages, variables: Mapping[str, Any] | None = None) -> str:
        """Renders a conversation up to the assistant's turn, for `encode_rendered`. Special tokens
        in messages or variables are marked as text, unless they are trusted.

        Raises:
          InputError: as for `render_chat`; or the template alters special tokens in contents.
        """
        variables = {**self.variables, **(variables or {})}
        text = self.render_chat(messages, add_generation_prompt=True, variables=variables)
        given = [list(messages), variables]
        marked = self.marked(given)
        if marked == given:
            return text
        found = self.render_chat(marked[0], add_generation_prompt=True, variables=marked[1])
        if found.replace(MARK, "") != text:
            raise InputError(f"messages: {CHANGED}")
        return found

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Renders messages from `wedlm_jax.messages.checked_messages` with the chat template.

        Raises:
          InputError: the tokenizer has no template, or the messages do not fit it.
        """
        if not self.has_chat_template:
            raise InputError("this checkpoint's tokenizer has no chat template")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **{**self.variables, **(variables or {})},
            )
        except Exception as error:
            # Templates are programs, and may raise anything.
            raise InputError(f"messages: the chat template refused them ({error})") from None
        return str(text)

    def check_tools(self, variables: Mapping[str, Any]) -> None:
        """Refuses, with an `InputError`, ``tools`` that the chat template does not mention: the
        model would not see them."""
        template = str(getattr(self.tokenizer, "chat_template", ""))
        if "tools" in variables and "tools" not in template:
            raise InputError("tools: this checkpoint's chat template does not support them")

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes that a token stands for, which may be part of a character. For a
        special token these are its spelling; for an unknown one, none."""
        if token_id not in self.token_ids:
            return b""
        if (added := self._added.get(token_id)) is not None:
            return str(added.content).encode()
        token = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if self._is_byte_level and all(letter in BYTES for letter in token):
            return bytes(BYTES[letter] for letter in token)
        if fallback := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(fallback[1])
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return str(text).encode("utf-8", "replace")

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, which `decode` drops."""
        flagged = {token_id for token_id, token in self._added.items() if token.special}
        return frozenset(flagged.union(self.tokenizer.all_special_ids))

    @functools.cached_property
    def _added(self) -> dict[int, Any]:
        found = getattr(self.tokenizer, "added_tokens_decoder", {})
        return {int(token_id): token for token_id, token in found.items()}

    @functools.cached_property
    def _is_byte_level(self) -> bool:
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        decoder = None if backend is None else backend.decoder
        return decoder is not None and b'"ByteLevel"' in decoder.__getstate__()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids`` without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def complete_text(self, token_ids: Sequence[int]) -> str:
        """Decodes like `decode`, but drops a last character whose bytes are incomplete."""
        text = self.decode(token_ids)
        meant = self._incomplete_ids and list(token_ids[-len(self._incomplete_ids) :])
        if text.endswith(INCOMPLETE) and meant != self._incomplete_ids:
            return text.rstrip(INCOMPLETE)
        return text


class GrowingText:
    """The text of a growing list of tokens, of which only the last ones are decoded again.

    The text before them is settled at a place where decoding both parts separately gives the whole
    text; with tokenizers that have no such place, everything is decoded each time.
    """

    def __init__(self, codec: TextCodec):
        self._codec = codec
        self._settled, self._tail = "", list[int]()
        self._longest = 2 * SETTLED_BEHIND

    def add(self, token_ids: Sequence[int]) -> str:
        """Adds tokens, and returns the `TextCodec.complete_text` of all tokens so far."""
        self._tail.extend(token_ids)
        if len(self._tail) > self._longest:
            self._settle()
        return self._settled + self._codec.complete_text(self._tail)

    def _settle(self) -> None:
        whole = self._codec.decode(self._tail)
        # A cut within a character, or where a space is lost, does not work; the next one may.
        for cut in range(len(self._tail) - SETTLED_BEHIND, len(self._tail)):
            front = self._codec.decode(self._tail[:cut])
            fits = not front.endswith(INCOMPLETE)
            if fits and front + self._codec.decode(self._tail[cut:]) == whole:
                self._settled += front
                del self._tail[:cut]
                break
        self._longest = 2 * len(self._tail) + SETTLED_BEHIND


class StopStrings:
    """Finds the first stop string in a growing completion.

    Matching is on the decoded text, so a stop string may start and end inside tokens. A stop string
    that is complete within the first ``min_tokens`` tokens does not count.
    """

    def __init__(self, codec: TextCodec, stop: Sequence[str], min_tokens: int = 0):
        self._codec, self._stop, self._min_tokens = codec, tuple(stop), min_tokens
        # This character disappears when the next byte completes the character it stands for.
        self._may_vanish = any(INCOMPLETE in one for one in self._stop)

    def find(self, token_ids: Sequence[int]) -> tuple[int, str] | None:
        """Returns the number of tokens in which the first stop string is complete, and the text
        before it; None if there is none."""
        early = len(self._codec.complete_text(token_ids[: self._min_tokens]))

        def is_complete(length: int) -> bool:
            return bool(self._places(self._codec.complete_text(token_ids[:length]), early))

        lengths = range(1, len(token_ids) + 1)
        if self._may_vanish:
            length = next(filter(is_complete, lengths), None)
        elif is_complete(len(token_ids)):
            length = lengths[bisect.bisect_left(lengths, True, key=is_complete)]
        else:
            length = None
        if length is None:
            return None
        # Only these tokens count, so that the answer does not depend on how many more had been
        # committed when the search began.
        text = self._codec.complete_text(token_ids[:length])
        return length, text[: min(self._places(text, early))]

    def stands_in(self, text: str, start: int) -> bool:
        """Returns whether any stop string may end after character ``start`` of ``text``."""
        return self._may_vanish or any(
            text.find(stop, max(start - len(stop) + 1, 0)) >= 0 for stop in self._stop
        )

    def _places(self, text: str, early: int) -> list[int]:
        """Returns the first place of each stop string that occurs and does not end within the first
        ``early`` characters."""
        found = (text.find(stop, max(early - len(stop) + 1, 0)) for stop in self._stop)
        return [place for place in found if place >= 0]

    def safe_length(self, text: str) -> int:
        """Returns how many characters of ``text`` cannot be part of an unfinished stop string."""
        longest = 0
        for stop in self._stop:
            sizes = range(min(len(stop) - 1, len(text)), longest, -1)
            longest = next((n for n in sizes if text.endswith(stop[:n])), longest)
        return len(text) - longest


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # A lone surrogate, half a character, which no tokenizer accepts.
        raise InputError("the prompt has half of a surrogate pair: not UTF-8") from None


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppresses the advice of transformers on PyTorch and on unknown model types."""
    variable = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(variable)
    with contextlib.ExitStack() as restored:
        if before is None:
            restored.callback(os.environ.pop, variable)
        else:
            restored.callback(os.environ.__setitem__, variable, before)
        os.environ[variable] = "1"
        # Importing sets the level of this logger, so the level is changed afterwards.
        importlib.import_module("transformers")
        logger = logging.getLogger("transformers")
        restored.callback(logger.setLevel, logger.level)
        logger.setLevel(logging.ERROR)
        restored.enter_context(warnings.catch_warnings(action="ignore"))
        yield


# --- prompts from callers -------------------------------------------------------------------


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Returns one or several prompts as a list; a NumPy array of integers counts as a list."""
    if isinstance(prompts, np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(
            "prompts: expected a text, a list of token ids, or a list of those, "
            f"not {type(prompts).__name__}"
        )
    if len(prompts) and _are_integers(prompts):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def for_each(
    prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> Sequence[SamplingParams]:
    """Returns the sampling parameters of each prompt, from one for all or one for each."""
    if isinstance(params, SamplingParams):
        return [params] * len(prompts)
    if not isinstance(params, list | tuple) or not all(
        isinstance(one, SamplingParams) for one in params
    ):
        raise InputError("params: expected SamplingParams, or a list of them")
    if len(params) != len(prompts):
        raise InputError(f"{len(prompts)} prompts came with {len(params)} sampling parameters")
    return params


def as_token_ids(prompt: Sequence[int]) -> Sequence[int]:
    """Returns ``prompt`` if it is a flat list of integers, whose range the engine checks; else
    raises an `InputError`."""
    ids: Any = prompt.tolist() if isinstance(prompt, np.ndarray) else prompt
    listed = isinstance(ids, Sequence) and not isinstance(ids, str | bytes)
    if not listed or not _are_integers(ids):
        raise InputError("expected a text or a flat list of token ids")
    return ids


def is_integer(value: object) -> bool:
    return _are_integers([value])


def _are_integers(values: Iterable[object]) -> bool:
    # Long lists have few types.
    return all(issubclass(t, int | np.integer) and t is not bool for t in set(map(type, values)))


def numbered(what: str, number: int, count: int) -> contextlib.AbstractContextManager[None]:
    """Prefixes an `InputError` with the number of the prompt, if there are several."""
    return errors_at(f"{what} {number}") if count > 1 else contextlib.nullcontext()
