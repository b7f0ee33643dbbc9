"""Random JSON schemas whose values are short, and whether a text fits one."""

import json
from typing import Any

import jsonschema_rs

Schema = dict[str, Any]
WORDS = ("cat", "dog", "a b", "é", "日本", 'say "x"')


def random_schema(rng, depth=2):
    """A schema of this depth at most."""
    kinds = [_integer, _number, _boolean, _choice, _string, _pattern, _nullable]
    if depth:
        kinds += [_object, _object, _array, _either]
    return kinds[rng.integers(len(kinds))](rng, depth)


def _integer(rng, _):
    low = int(rng.integers(-50, 50))
    return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 900))}


def _number(rng, _):
    return {"type": "number", "enum": [float(x) for x in rng.normal(size=3).round(2)]}


def _boolean(_rng, _):
    return {"type": "boolean"}


def _choice(rng, _):
    return {"enum": [*rng.choice(WORDS, 2).tolist(), int(rng.integers(9)), None]}


def _string(rng, _):
    least = int(rng.integers(0, 3))
    return {"type": "string", "minLength": least, "maxLength": least + int(rng.integers(0, 4))}


def _pattern(rng, _):
    pattern = rng.choice(["^[a-c]{2,4}$", "^x-[0-9][0-9]$", "^(é|b){1,3}z$"])
    return {"type": "string", "pattern": str(pattern)}


def _nullable(rng, _):
    return {"type": ["boolean", "null"], "title": "perhaps", "description": str(rng.integers(9))}


def _object(rng, depth):
    names = rng.permutation(["name", "age", "é", "a b"])[: rng.integers(1, 4)].tolist()
    return {
        "type": "object",
        "properties": {name: random_schema(rng, depth - 1) for name in names},
        "required": names[: rng.integers(0, len(names) + 1)],
        "additionalProperties": False,
    }


def _array(rng, depth):
    least = int(rng.integers(0, 2))
    items = random_schema(rng, depth - 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def _either(rng, depth):
    return {"anyOf": [random_schema(rng, depth - 1), {"type": "boolean"}]}


def fits(text, schema):
    """Whether a text is JSON that the schema allows."""
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text)))
    except json.JSONDecodeError:
        return False
