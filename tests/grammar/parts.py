"""A vocabulary without a model, and random schemas with an oracle that is not ours."""

from __future__ import annotations

import random
from typing import Any

from octavo.config import Vocabulary
from octavo.grammar.vocabulary import vocabulary_of

END, CALL, CALL_END = 256, 257, 258
LETTERS = "abcdefghijklmnopqrstuvwxyz"
UNICODE = 'aé"\\/\n\tßЖ漢🦉\u200d\x7f '


class Words:
    """All bytes, three special tokens, and some longer tokens that cut anywhere."""

    eos_ids = (END,)
    special_ids = frozenset((END, CALL, CALL_END))

    def __init__(self, seed: int = 0) -> None:
        draw = random.Random(seed)
        longer = [b'{"', b'":', b'", "', b"  ", b"\n  ", b"true", b"null", b"000", b"12345", b"e10"]
        source = (LETTERS * 4 + '"{}[],: \n0123456789').encode() + "é漢🦉".encode() * 4
        while len(longer) < 300:
            at = draw.randrange(len(source) - 3)
            longer.append(source[at : at + draw.randint(2, 3)])
        special = [b"<|end|>", b"<|call|>", b"<|call_end|>"]
        self.bytes_table = [bytes([byte]) for byte in range(256)] + special + longer

    def text(self, ids: list[int]) -> str:
        return b"".join(self.bytes_table[token] for token in ids if token != END).decode()


def vocabulary() -> Vocabulary:
    return vocabulary_of(Words())


def random_schema(draw: random.Random, depth: int = 3) -> dict[str, Any]:
    """A schema of the keywords that are enforced, which some value meets."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object", "object", "array", "tuple", "anyOf"]
    match draw.choice(kinds):
        case "string":
            schema: dict[str, Any] = {"type": "string"}
            least = draw.randint(0, 4)
            match draw.randrange(4):
                case 0:
                    return schema | {"minLength": least, "maxLength": least + draw.randint(0, 5)}
                case 1:
                    return schema | {
                        "pattern": draw.choice(["^[a-f]{2,4}$", "^x+y?$", r"^\d\d-\w$"])
                    }
                case 2:
                    return schema | {"format": draw.choice(["date", "uuid", "ipv4", "time"])}
            return schema | {"maxLength": 8}
        case "integer":
            low = draw.randint(-500, 500)
            schema = {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 300)}
            if draw.random() < 0.3:
                return {"type": "integer", "multipleOf": draw.randint(2, 50)}
            return schema if draw.random() < 0.7 else {"type": "integer", "exclusiveMinimum": low}
        case "number":
            low = draw.randint(-50, 50) / 4
            return {"type": "number", "minimum": low, "maximum": low + draw.randint(1, 40) / 4}
        case "enum":
            values = [random_value(draw) for _ in range(draw.randint(1, 4))]
            return {"enum": values}
        case "const":
            return {"const": random_value(draw)}
        case "object":
            return _random_object(draw, depth)
        case "array":
            least = draw.randint(0, 2)
            most = least + draw.randint(0, 2)
            items = random_schema(draw, depth - 1)
            return {"type": "array", "items": items, "minItems": least, "maxItems": most}
        case "tuple":
            first = [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]
            return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}
        case "anyOf":
            return {"anyOf": [random_schema(draw, depth - 1) for _ in range(draw.randint(1, 3))]}
        case plain:
            return {"type": plain}


def _random_object(draw: random.Random, depth: int) -> dict[str, Any]:
    names = draw.sample(["a", "b c", "größe", "x.y", "$id", 'q"q', "漢"], draw.randint(1, 4))
    properties = {name: random_schema(draw, depth - 1) for name in names}
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    schema["required"] = draw.sample(names, draw.randint(0, len(names)))
    if draw.random() < 0.5:
        schema["additionalProperties"] = False
    if draw.random() < 0.3:
        schema |= {"title": "T", "description": "of a thing", "x-note": [1]}
    return schema


def random_value(draw: random.Random) -> Any:
    match draw.randrange(6):
        case 0:
            return draw.randint(-99, 99)
        case 1:
            return None
        case 2:
            return [draw.randint(0, 9), "z"]
        case 3:
            return {"k": draw.random() < 0.5}
        case _:
            return "".join(draw.choice(UNICODE) for _ in range(draw.randint(0, 6)))
