"""Checks the values of options: their bounds, and values that may be given in several forms."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Any, NoReturn, TypeGuard, get_args, get_type_hints

from wedlm_jax.errors import InputError, shortened, written

UNBOUNDED = float("inf")


@dataclasses.dataclass(frozen=True)
class Option:
    """What a field of `SamplingParams`, `EngineConfig` or a recipe says beyond type and default.

    Attributes:
      help: what it does.
      low, high: bounds of a number, inclusive.
      above, below: whether ``low``, and whether ``high``, itself is excluded.
      integer, flag: whether a number must be an integer, and whether it is a boolean, by its type.
      choices: the allowed texts.
      also: texts that are allowed in addition to numbers.
      text: the metavar of its flag, if its value is a text.
      none: what None means; None if None is refused.
      array: the dtype of its array ``[N]`` on the device; None if it has none.
      trait: the trait that a program needs to have this array, a field of
        `wedlm_jax.decode.options.Traits`; None if every program has it.
    """

    help: str
    _: dataclasses.KW_ONLY
    low: float | None = None
    high: float = UNBOUNDED
    above: bool = False
    below: bool = False
    integer: bool = False
    flag: bool = False
    choices: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    text: str = ""
    none: str | None = None
    array: str | None = None
    trait: str | None = None

    def check(self, name: str, value: Any) -> None:
        """Refuses, with an `InputError` that names the field, a value of the wrong type or outside
        the bounds; lists are not checked here."""
        if (value is None and self.none is not None) or (self.also and value in self.also):
            return
        if self.low is not None:
            self._check_number(name, value, self.low)
        elif self.flag and not isinstance(value, bool):
            raise InputError(f"{name}: expected true or false, not {value!r}")
        elif self.choices and value not in self.choices:
            allowed = ", ".join([*self.choices, *(["None"] if self.none else [])])
            raise InputError(f"{name}: expected one of {allowed}, not {value!r}")
        elif self.text and not isinstance(value, str):
            raise InputError(f"{name}: expected a text, not {value!r}")

    def _check_number(self, name: str, value: Any, low: float) -> None:
        number = is_number(value) and not (self.integer and isinstance(value, float))
        excluded = low if self.above else None, self.high if self.below else None
        infinite = number and not math.isfinite(value)
        if not number or infinite or not low <= value <= self.high or value in excluded:
            what = "an integer" if self.integer else "a finite number" if infinite else "a number"
            also = "".join(f" or {text!r}" for text in self.also)
            raise InputError(f"{name}: expected {what} {self.bounds}{also}, not {value!r}")

    @property
    def bounds(self) -> str:
        """The bounds of a number in words; empty if it has none."""
        if self.low is None:
            return ""
        low, high = written(self.low), written(self.high)
        least = f"above {low}" if self.above else f"of at least {low}"
        if self.high == UNBOUNDED:
            return least
        if not (self.above or self.below):
            return f"from {low} to {high}"
        return f"{least}{' and below' if self.below else ', up to'} {high}"


def options_of(kind: type) -> dict[str, Option]:
    """Returns the description of every field of a dataclass, in order."""
    hints = get_type_hints(kind, include_extras=True)
    options = {}
    for field in dataclasses.fields(kind):
        annotated, option = get_args(hints[field.name])
        types = get_args(annotated) if isinstance(annotated, UnionType) else (annotated,)
        options[field.name] = dataclasses.replace(option, integer=int in types, flag=bool in types)
    return options


def is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_token_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_text(value: object) -> bool:
    """Returns whether a value is a string that is not empty."""
    return isinstance(value, str) and bool(value)


def as_tuple(
    name: str, given: Any, what: str, is_valid: Callable[[object], bool]
) -> tuple[Any, ...]:
    """Returns a field that lists values as a tuple; empty for None. ``what`` says what the values
    are, for the message of the `InputError`."""
    listed = isinstance(given, Collection) and not isinstance(given, str | bytes | Mapping)
    if given is not None and not (listed and all(map(is_valid, given))):
        raise InputError(f"{name}: expected {what}, not {shortened(repr(given), 60)}")
    return () if given is None else tuple(given)


def as_bias(given: Any) -> dict[int, float]:
    """Returns ``logit_bias`` by token id; JSON keys are texts, so ids may be texts."""
    refusal = "logit_bias: expected an object of token ids and numbers from -100 to 100"
    if not isinstance(given or {}, Mapping):
        raise InputError(f"{refusal}, not {given!r}")
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        token = int(key) if isinstance(key, str) and key.isdecimal() else key
        if not is_token_id(token) or not is_number(value) or not -100 <= value <= 100:
            raise InputError(f"{refusal}, not {key!r}: {value!r}")
        bias[token] = value
    return bias


def as_words(given: Any) -> tuple[str | tuple[int, ...], ...]:
    """Returns ``bad_words`` as texts and tuples of token ids; a single text counts as a list."""
    words: list[str | tuple[int, ...]] = []
    listed = given if isinstance(given, list | tuple) else [] if given is None else [given]
    for word in listed:
        if isinstance(word, str) and word.strip():
            words.append(word)
        elif isinstance(word, list | tuple) and word and all(map(is_token_id, word)):
            words.append(tuple(word))
        else:
            raise InputError(f"bad_words: expected texts or lists of token ids, not {word!r}")
    return tuple(words)


def as_schema(given: Any) -> str | None:
    """Returns ``json_schema`` as JSON text, which can be hashed and compared. Its keys keep their
    order, which is also their order in the completion. A pydantic model, or any object with
    ``model_json_schema``, is replaced by its schema."""
    refusal = "json_schema: expected a JSON schema, an object or its text"
    if given is None:
        return None
    if callable(of_model := getattr(given, "model_json_schema", None)):
        given = of_model()
    try:
        schema = json.loads(given, parse_constant=_refuse) if isinstance(given, str) else given
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{refusal} ({shortened(str(error))})") from None
    if not isinstance(schema, Mapping):
        raise InputError(f"{refusal}, not {shortened(text, 60)}")
    return text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")
