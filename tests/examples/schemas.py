"""Random JSON schemas whose values are short, and whether a text fits one."""

import json

import jsonschema_rs

WORDS = ("cat", "dog", "a b", "é", "日本", 'say "x"')
PATTERNS = ["^[a-c]{2,4}$", "^x-[0-9][0-9]$", "^(é|b){1,3}z$"]
SIMPLE = ("integer", "number", "boolean", "choice", "string", "pattern", "nullable")


def random_schema(rng, depth=2):
    """A schema of this depth at most."""
    kinds = (*SIMPLE, "object", "object", "array", "either") if depth else SIMPLE
    match kinds[rng.integers(len(kinds))]:
        case "integer":
            low = int(rng.integers(-50, 50))
            return {"type": "integer", "minimum": low, "maximum": low + int(rng.integers(0, 900))}
        case "number":
            return {"type": "number", "enum": [float(x) for x in rng.normal(size=3).round(2)]}
        case "boolean":
            return {"type": "boolean"}
        case "choice":
            return {"enum": [*rng.choice(WORDS, 2).tolist(), int(rng.integers(9)), None]}
        case "string":
            least = int(rng.integers(0, 3))
            most = least + int(rng.integers(0, 4))
            return {"type": "string", "minLength": least, "maxLength": most}
        case "pattern":
            return {"type": "string", "pattern": str(rng.choice(PATTERNS))}
        case "nullable":
            kind = ["boolean", "null"]
            return {"type": kind, "title": "perhaps", "description": str(rng.integers(9))}
        case "object":
            names = rng.permutation(["name", "age", "é", "a b"])[: rng.integers(1, 4)].tolist()
            return {
                "type": "object",
                "properties": {name: random_schema(rng, depth - 1) for name in names},
                "required": names[: rng.integers(0, len(names) + 1)],
                "additionalProperties": False,
            }
        case "array":
            least = int(rng.integers(0, 2))
            items = random_schema(rng, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}
        case "either":
            return {"anyOf": [random_schema(rng, depth - 1), {"type": "boolean"}]}


def fits(text, schema):
    """Whether a text is JSON that the schema allows."""
    try:
        return bool(jsonschema_rs.is_valid(schema, json.loads(text)))
    except json.JSONDecodeError:
        return False
