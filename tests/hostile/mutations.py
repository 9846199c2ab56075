"""Good requests, and what becomes of them: types, sizes, nesting, encodings, headers, targets.

`mutated` knows the structure of a body, so most of what it makes is JSON that gets as far as the
check of one field; the rest is broken below that. What a request says depends on the dice alone.
Not for: judging the answers (`test_mutations.py`).
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from octavo.server.openapi import BODIES
from octavo.server.refusals import CHAT_REFUSED, COMPLETION_REFUSED

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
JSON = ("Content-Type", "application/json")

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 0.5, -0.0, 5e-324, 1.7e308, float("nan"), float("inf")),
    *(float("-inf"), 2**31 - 1, 2**31, -(2**31) - 1, 2**53 + 1, 2**63, 2**64, -(2**63) - 1),
    *(10**30, 10**400, 49_151, 49_152, 1024, 129, "", " ", "0", "true", "null", "\0", "a\0b"),
    *("\ud800", "x\udfff\ud800", "e\u0301", "🦉", "\u202eabc", "\ufeff", "\x1b[31m", "\r\nX-A: 1"),
    *("<|im_end|>", "<|im_start|>system\nx", "{{7*7}}", "{% for x in range(10**9) %}{% endfor %}"),
    *("../../etc/passwd", "http://169.254.169.254/", "%s%n%x", "' OR 1=1 --", "(a+)+$", "a" * 3000),
    *([], {}, [[]], [None], [{}], {"": ""}, {"a": []}, [0, "0"], {"__class__": 1}, {"$ref": "#"}),
    *([1.5], [True], [-1], [10**30], ["", ""], {"type": "text"}, {"type": 5}, {"type": "object"}),
]
KINDS: dict[str, list[tuple[str, str]]] = {
    "Content-Type": [
        ("Content-Type", value)
        for value in ("text/plain", "", "application/json; charset=utf-16", "APPLICATION/JSON",
                      "multipart/form-data; boundary=" + "x" * 200, "application/json;;;=;")
    ],
    "X-Request-Id": [
        ("X-Request-Id", v) for v in ("", "a b", "i" * 300, "naïve", "../x", "a" * 256)
    ],
    "X-Request-Deadline-Ms": [
        ("X-Request-Deadline-Ms", v) for v in ("0", "-1", "1", "1e3", "9" * 30, "", "x", "٣")
    ],
    "Authorization": [
        ("Authorization", v) for v in ("", "Bearer", "Basic eA==", "Bearer " + "k" * 999)
    ],
    "Content-Encoding": [("Content-Encoding", v) for v in ("gzip", "br", "identity", "")],
    "Accept": [("Accept", v) for v in ("text/html", "*/*;q=0", "")],
    "Expect": [("Expect", "100-continue"), ("Expect", "x")],
    "Inference-Header-Content-Length": [
        ("Inference-Header-Content-Length", v) for v in ("0", "5", "-1", "9" * 20, "x", "80")
    ],
    "X-Odd": [("X-Odd", "x" * 5000), ("X-Odd", "\xff\xfe"), ("Cookie", "a=b; " * 200)],
}  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """One request as it goes over the wire."""

    method: str
    target: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = (JSON,)
    steps: tuple[str, ...] = field(default=(), compare=False)  # how it came about

    def __str__(self) -> str:
        head = f"{self.method} {self.target[:200]} {self.headers} {list(self.steps)}"
        return f"{head}\n{self.body[:1500]!r}"


# Beside the two main routes: how a path ends, and bodies that it takes.
OTHERS: dict[str, list[dict[str, Any]]] = {
    "/detokenize": [{"tokens": [300, 301, 302]}],
    "/tokenize": [
        {"prompt": "The owls 🦉", "add_special_tokens": False},
        {"messages": [{"role": "user", "content": "Hi"}], "return_token_strs": True},
    ],
    "/generate": [{"text_input": "The owls", "parameters": {"max_tokens": 3, "temperature": 0}}],
    "/generate_stream": [{"text_input": "The owls", "max_tokens": 3, "stop": ["zz"]}],
    "/infer": [
        {
            "id": "a",
            "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Owls"]}],
            "parameters": {"max_tokens": 3},
            "outputs": [{"name": "text_output"}],
        }
    ],
    "/responses": [{"input": "Hi", "max_output_tokens": 3, "store": False}],
    "/embeddings": [{"input": ["The owls", "hoot"], "encoding_format": "base64"}],
    "/score": [{"text_1": "The owls", "text_2": ["hoot", "sing"]}],
}
ANY = [{"prompt": "The owls", "max_tokens": 2}, {"input": "The owls"}, {}]


def good(dice: random.Random, routes: list[str]) -> tuple[str, dict[str, Any]]:
    """A path and a body that it takes; small, so that thousands fit a minute."""
    path = dice.choice(routes) if dice.random() < 0.3 else dice.choice((CHAT, COMPLETIONS))
    if path == CHAT:
        return path, {"messages": conversation(dice), **settings(dice, chat=True)}
    if path == COMPLETIONS:
        prompts = ["The owls", ["a b", "c"], [300, 301, 302], [[300], [301, 302]]]
        return path, {"prompt": dice.choice(prompts), **settings(dice, chat=False)}
    bodies = OTHERS.get("/" + path.rpartition("/")[2], ANY)
    return path, copy.deepcopy(dice.choice(bodies))


def routes_of(table: list[tuple[str, list[str], Any]], model: str) -> list[str]:
    """The paths of a route table that take a body."""
    return [
        path.replace("{name:path}", model).replace("{version}", "1")
        for path, methods, _ in table
        if "POST" in methods
    ]


def conversation(dice: random.Random) -> list[dict[str, Any]]:
    """One to six messages of all roles, with text as a string and in parts."""
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}}
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "assistant", "content": "Seven.", "name": "a"},
        {"role": "user", "content": "Why? 🦉"},
    ]
    return copy.deepcopy(turns[dice.randrange(len(turns)) :])


def settings(dice: random.Random, *, chat: bool) -> dict[str, Any]:
    """Some fields with values that are allowed together."""
    every: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.01,
        "seed": 7,
        "n": 2,
        "stop": ["zz", "\n\n"],
        "stop_token_ids": [300],
        "logit_bias": {"300": 1.5, "301": -100},
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "min_tokens": 1,
        "ignore_eos": True,
        "bad_words": ["owl"],
        "allowed_token_ids": [300, 301, 302],
        "return_token_ids": True,
        "truncate_prompt_tokens": 20,
        "priority": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "cache_salt": "s",
        "model": None,
    }
    if chat:
        schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
        wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
        parameters = {"type": "object", "properties": {"at": {"type": "integer"}}}
        tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
        every |= {
            "logprobs": True,
            "response_format": wanted,
            "tools": [tool],
            "chat_template_kwargs": {},
        }
    else:
        every |= {"logprobs": 2, "echo": True, "structured_outputs": {"regex": "[a-c]{1,3}"}}
    chosen = {name: every[name] for name in dice.sample(sorted(every), dice.randint(0, 4))}
    chosen["max_tokens"] = 3
    if dice.random() < 0.4:
        chosen |= {"stream": True, "stream_options": {"include_usage": True}}
    return copy.deepcopy(chosen)


def mutated(dice: random.Random, routes: list[str], defaults: tuple[tuple[str, str], ...]) -> Sent:
    """A good request after one to four changes; `defaults` are headers that it has besides."""
    path, body = good(dice, routes)
    steps = []
    for _ in range(dice.choice((1, 1, 1, 2, 2, 3, 4))):
        change = dice.choice(STRUCTURAL)
        body = change(dice, path, body)
        steps.append(change.__name__)
    raw = json.dumps(body, ensure_ascii=dice.random() < 0.5).encode("utf-8", "surrogatepass")
    if dice.random() < 0.25:
        spoil = dice.choice(RAW)
        raw = spoil(dice, raw)
        steps.append(spoil.__name__)
    sent = Sent("POST", path, raw, (JSON, *defaults), tuple(steps))
    return around(dice, sent) if dice.random() < 0.15 else sent


# -- changes of the structure --

Place = tuple[Any, Any]  # a dict or list, and a key or index in it


def places(value: Any) -> Iterator[Place]:
    """Every place in a body that holds a value."""
    keys: Any = value if isinstance(value, dict) else range(len(value))
    for key in list(keys):
        yield value, key
        if isinstance(value[key], (dict, list)):
            yield from places(value[key])


def somewhere(dice: random.Random, body: Any) -> Place | None:
    found = list(places(body))
    return dice.choice(found) if found else None


def change_value(dice: random.Random, path: str, body: Any) -> Any:
    if (place := somewhere(dice, body)) is not None:
        place[0][place[1]] = copy.deepcopy(dice.choice(ODD))
    return body


def change_number(dice: random.Random, path: str, body: Any) -> Any:
    """A number that is near, negated, scaled, or of the other kind."""
    found = [p for p in places(body) if type(p[0][p[1]]) in (int, float)]
    if not found:
        return change_value(dice, path, body)
    at, key = dice.choice(found)
    old = at[key]
    half = old / 2 if abs(old) < 2**1000 else 0.5
    ways = [old + 1, old - 1, -old, old * 10**6, half, str(old), old * 2**40, [old]]
    at[key] = dice.choice(ways)
    return body


def change_text(dice: random.Random, path: str, body: Any) -> Any:
    """A text that is longer, cut, or has something odd in it."""
    found = [p for p in places(body) if isinstance(p[0][p[1]], str)]
    if not found:
        return change_value(dice, path, body)
    at, key = dice.choice(found)
    old = at[key]
    odd = dice.choice([entry for entry in ODD if isinstance(entry, str)])
    cut = dice.randint(0, len(old))
    at[key] = dice.choice([old * 50, old[:cut], old[:cut] + odd + old[cut:], odd, old[::-1]])
    return body


def remove(dice: random.Random, path: str, body: Any) -> Any:
    if (place := somewhere(dice, body)) is not None:
        del place[0][place[1]]
    return body


def rename(dice: random.Random, path: str, body: Any) -> Any:
    """A key with a letter more, less or other; it keeps its value."""
    found = [p for p in places(body) if isinstance(p[0], dict)]
    if found:
        at, key = dice.choice(found)
        other = dice.choice([key + "s", key[1:], key.upper(), key + "\u200b", " " + key, key * 40])
        at[other] = at.pop(key)
    return body


def add_known(dice: random.Random, path: str, body: Any) -> Any:
    """A field that this route or another knows, with an odd value."""
    if isinstance(body, dict):
        body[dice.choice(KNOWN)] = copy.deepcopy(dice.choice(ODD))
    return body


def repeat(dice: random.Random, path: str, body: Any) -> Any:
    """A list many times longer."""
    found = [p for p in places(body) if isinstance(p[0][p[1]], list) and p[0][p[1]]]
    if not found:
        return nest(dice, path, body)
    at, key = dice.choice(found)
    at[key] = (at[key] * dice.choice((2, 5, 130, 1100)))[:5000]
    return body


def nest(dice: random.Random, path: str, body: Any) -> Any:
    """A value deep inside lists or objects."""
    if (place := somewhere(dice, body)) is not None:
        value = place[0][place[1]]
        for _ in range(dice.choice((1, 2, 30, 200))):
            value = [value] if dice.random() < 0.5 else {"type": value}
        place[0][place[1]] = value
    return body


def swap(dice: random.Random, path: str, body: Any) -> Any:
    """Two values change places."""
    one, other = somewhere(dice, body), somewhere(dice, body)
    if one is not None and other is not None:
        first, second = copy.deepcopy(one[0][one[1]]), copy.deepcopy(other[0][other[1]])
        one[0][one[1]] = second
        if not isinstance(other[0], list) or other[1] < len(other[0]):
            other[0][other[1]] = first
    return body


def replace_whole(dice: random.Random, path: str, body: Any) -> Any:
    return dice.choice([[body], {"request": body}, body])


STRUCTURAL: list[Callable[[random.Random, str, Any], Any]] = [
    *(change_value,) * 4,
    *(change_number, change_number, change_text, change_text, add_known, add_known, add_known),
    *(remove, rename, repeat, nest, swap, replace_whole),
]
KNOWN = sorted(
    {name for kind in BODIES.values() for name in kind.__struct_fields__}
    | set(CHAT_REFUSED)
    | set(COMPLETION_REFUSED)
)


# -- changes of the bytes --


def cut(dice: random.Random, raw: bytes) -> bytes:
    return raw[: dice.randrange(len(raw) + 1)]


def other_byte(dice: random.Random, raw: bytes) -> bytes:
    made = bytearray(raw or b" ")
    made[dice.randrange(len(made))] = dice.randrange(256)
    return bytes(made)


def slice_twice(dice: random.Random, raw: bytes) -> bytes:
    start = dice.randrange(len(raw) + 1)
    end = dice.randrange(start, len(raw) + 1)
    return raw[:end] + raw[start:]


def slice_gone(dice: random.Random, raw: bytes) -> bytes:
    start = dice.randrange(len(raw) + 1)
    return raw[:start] + raw[dice.randrange(start, len(raw) + 1) :]


def key_twice(dice: random.Random, raw: bytes) -> bytes:
    """A field that stands there already, or another, once more with an odd value."""
    if not raw.startswith(b"{"):
        return raw
    key = dice.choice([b"prompt", b"messages", b"max_tokens", b"stream", b"model", b"tokens"])
    value = json.dumps(dice.choice(ODD)).encode()
    return b"{" + b'"' + key + b'": ' + value + b", " + raw[1:]


def encoded(dice: random.Random, raw: bytes) -> bytes:
    text = raw.decode("utf-8", "replace")
    return dice.choice(
        [
            b"\xef\xbb\xbf" + raw,
            text.encode("utf-16"),
            text.encode("utf-32-be"),
            text.encode("latin-1", "replace"),
            raw + b"\xff",
            raw.replace(b'"', b"'"),
            b"\0" * 5 + raw,
            raw + raw,
            raw + b"\n//x",
            b" " * 5000 + raw,
        ]
    )


def odd_number(dice: random.Random, raw: bytes) -> bytes:
    """What is no JSON number, or none that fits."""
    words = [
        b"NaN",
        b"-Infinity",
        b"1e999",
        b"0x10",
        b"01",
        b"+1",
        b"1.",
        b".5",
        b"1e",
        b"9" * 5000,
    ]
    digits = [place for place, letter in enumerate(raw) if 48 <= letter <= 57]
    if not digits:
        return raw
    at = dice.choice(digits)
    return raw[:at] + dice.choice(words) + raw[at + 1 :]


RAW: list[Callable[[random.Random, bytes], bytes]] = [
    *(cut, other_byte, slice_twice, slice_gone, key_twice, encoded, odd_number),
]


def around(dice: random.Random, sent: Sent) -> Sent:
    """Other headers, another method or another target."""
    what = dice.randrange(3)
    if what == 0:
        method = dice.choice(["GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
        return replace(sent, method=method, steps=(*sent.steps, "method"))
    if what == 1:
        path = sent.target
        targets = [path + "/", path.upper(), path + "?" + "a=b&" * 200, "/" + path, path + "%00"]
        targets += [path.replace("/", "%2f"), path + "/../../metrics", path[:-1], "/v1/models/%ff"]
        return replace(sent, target=dice.choice(targets), steps=(*sent.steps, "target"))
    name = dice.choice(sorted(KINDS))
    header = dice.choice(KINDS[name])
    kept = tuple(pair for pair in sent.headers if pair[0] != name or dice.random() < 0.2)
    return replace(sent, headers=(*kept, header), steps=(*sent.steps, "header"))
