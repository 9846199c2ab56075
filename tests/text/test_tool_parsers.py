"""Calls as each family writes them: random ones, cut in every way, half written, badly written."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from octavo.text.tools import deepseek_v3 as ds
from octavo.text.tools.choose import FAMILIES, Family, family_of
from octavo.text.tools.declare import Tool, read_tools
from octavo.text.tools.events import Arguments, CallEnd, CallStart, Content, Event

LETTERS = ['"', "\\", "{", "}", "[", "]", "\n", "\t", "'", ":", ",", "<", ">", "/", "a", "B", "é"]
LETTERS += ["日", "🦉", "\u2028", " ", "0", "-", "</", "tool_call", "`", "\x01", "\x7f"]
WORDS = ["The", "answer", "is", "near:", "{not", "a", "call}", "🦉", "<b>", "[1]", '"x"', "a < b"]


@dataclass
class Read:
    """Events folded, after a check of their order."""

    content: str = ""
    names: list[str] = field(default_factory=list)
    arguments: list[str] = field(default_factory=list)
    ended: list[bool] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def add(self, events: Sequence[Event]) -> Read:
        for event in events:
            match event:
                case Content(text):
                    assert text
                    self.content += text
                case CallStart(index, id_, name):
                    assert index == len(self.names)
                    self.names.append(name)
                    self.arguments.append("")
                    self.ended.append(False)
                    self.ids.append(id_)
                case Arguments(index, text):
                    assert text
                    assert index == len(self.names) - 1
                    assert not self.ended[index]
                    self.arguments[index] += text
                case CallEnd(index):
                    assert not self.ended[index]
                    self.ended[index] = True
                case _:
                    raise AssertionError(event)
        assert len(set(self.ids)) == len(self.ids)
        return self

    @property
    def calls(self) -> list[tuple[str, Any]]:
        assert all(self.ended)
        pairs = zip(self.names, self.arguments, strict=True)
        return [(name, json.loads(arguments)) for name, arguments in pairs]

    def same(self, other: Read) -> bool:
        mine = (self.content, self.names, self.arguments, self.ended)
        return mine == (other.content, other.names, other.arguments, other.ended)


def read(
    family: Family, pieces: Sequence[str], tools: Sequence[Tool] = (), **options: bool
) -> Read:
    parser = family.parser(tools, **options)
    found = Read()
    for piece in pieces:
        found.add(parser.feed(piece))
    return found.add(parser.finish())


def random_text(dice: random.Random, most: int = 12) -> str:
    return "".join(dice.choice(LETTERS) for _ in range(dice.randrange(most)))


def random_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(8 if depth < 3 else 6)
    if kind < 2:
        return random_text(dice)
    if kind == 2:
        return dice.choice([0, -1, 7, 10**18, -3.25, 1e-7, 6.02e23])
    if kind < 6:
        return dice.choice([True, False, None])
    if kind == 6:
        return [random_value(dice, depth + 1) for _ in range(dice.randrange(4))]
    return {random_text(dice, 6): random_value(dice, depth + 1) for _ in range(dice.randrange(4))}


def random_calls(dice: random.Random, least: int = 0) -> list[tuple[str, dict[str, Any]]]:
    return [
        (
            dice.choice(["f", "get_weather", "a.b-c", "function", "Note2"]),
            {f"k{place}": random_value(dice) for place in range(dice.randrange(4))},
        )
        for _ in range(dice.randrange(least, 4))
    ]


def dumped(dice: random.Random, value: Any) -> str:
    return json.dumps(
        value,
        ensure_ascii=dice.random() < 0.5,
        indent=dice.choice([None, None, 1]),
        separators=dice.choice([None, (",", ":")]),
    )


def as_object(dice: random.Random, name: str, arguments: Any, key: str) -> str:
    record = {"name": name, key: arguments}
    if dice.random() < 0.2:
        record = dict(reversed(record.items()))
    return dumped(dice, record)


Calls = list[tuple[str, dict[str, Any]]]


def hermes(dice: random.Random, text: str, calls: Calls) -> str:
    for call in calls:
        between = dice.choice(["\n", ""])
        text += f"{dice.choice(['', chr(10)])}<tool_call>{between}"
        text += as_object(dice, *call, "arguments") + between + "</tool_call>"
    return text


def llama(dice: random.Random, text: str, calls: Calls) -> str:
    objects = [as_object(dice, *call, "parameters") for call in calls]
    return dice.choice(["", "<|python_tag|>"]) + dice.choice(["; ", ";", "\n"]).join(objects)


def mistral(dice: random.Random, text: str, calls: Calls) -> str:
    if not calls:
        return text
    if dice.random() < 0.4:
        objects = [as_object(dice, *call, "arguments") for call in calls]
        return f"{text}[TOOL_CALLS] [{', '.join(objects)}]"
    marks = dice.choice(["", "[ARGS]", "[CALL_ID]abc123XYZ[ARGS]"])
    return text + "".join(f"[TOOL_CALLS]{name}{marks}{dumped(dice, a)}" for name, a in calls)


def deepseek_v3(dice: random.Random, text: str, calls: Calls) -> str:
    parts = [
        f"{ds.CALL_BEGIN}function{ds.SEPARATOR}{name}\n```json\n{dumped(dice, a)}\n```{ds.CALL_END}"
        for name, a in calls
    ]
    return text + (ds.CALLS_BEGIN + "\n".join(parts) + ds.CALLS_END if calls else "")


def deepseek_v31(dice: random.Random, text: str, calls: Calls) -> str:
    parts = [
        f"{ds.CALL_BEGIN}{name}{ds.SEPARATOR}{dumped(dice, a)}{ds.CALL_END}" for name, a in calls
    ]
    return text + (ds.CALLS_BEGIN + "".join(parts) + ds.CALLS_END if calls else "")


WRITERS: dict[str, Callable[[random.Random, str, Calls], str]] = {
    "hermes": hermes,
    "llama3_json": llama,
    "mistral": mistral,
    "deepseek_v3": deepseek_v3,
    "deepseek_v31": deepseek_v31,
}


def cuts(dice: random.Random, text: str) -> Iterator[list[str]]:
    """The text whole, by letters, in two at every place, and in random pieces."""
    yield [text]
    yield list(text)
    for place in range(1, len(text)):
        yield [text[:place], text[place:]]
    for _ in range(8):
        places = sorted(dice.sample(range(len(text) + 1), min(len(text), dice.randrange(1, 12))))
        yield [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.fixture
def dice() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_the_same_however_they_are_cut(name: str, dice: random.Random) -> None:
    family, tried = FAMILIES[name], 0
    while tried < 5000:
        calls = random_calls(dice, least=name == "llama3_json")
        text = " ".join(dice.choice(WORDS) for _ in range(dice.randrange(4)))
        if name == "llama3_json":
            text = ""
        written = WRITERS[name](dice, text, calls)
        for pieces in cuts(dice, written):
            tried += 1
            found = read(family, pieces)
            assert found.calls == calls, pieces
            assert found.content.strip() == text.strip(), pieces


@pytest.mark.parametrize("name", WRITERS)
def test_broken_and_half_written_calls_do_not_depend_on_the_cut(
    name: str, dice: random.Random
) -> None:
    """Letters are dropped, doubled and put in; nothing is lost and no call is invented."""
    family = FAMILIES[name]
    for _ in range(60):
        written = list(WRITERS[name](dice, "Well ", random_calls(dice, least=1)))
        for _ in range(dice.randrange(4)):
            place = dice.randrange(len(written))
            written[place] = dice.choice(["", written[place] * 2, dice.choice(LETTERS)])
        text = "".join(written)[: dice.randrange(len(written) + 1)]
        whole = read(family, [text])
        for pieces in list(cuts(dice, text))[1::7]:
            assert read(family, pieces).same(whole), (text, pieces)
        for arguments, ended in zip(whole.arguments, whole.ended, strict=True):
            assert_beginning_of_json(arguments, ended)


def assert_beginning_of_json(text: str, whole: bool) -> None:
    """Valid, or valid once what is open has been closed."""
    if whole:
        json.loads(text)
        return
    for ending in endings(text):
        try:
            json.loads(text + ending)
        except ValueError:
            continue
        return
    raise AssertionError(text)


def endings(text: str) -> Iterator[str]:
    stack, in_text, skip = "", False, False
    for letter in text:
        if skip:
            skip = False
        elif in_text:
            skip, in_text = letter == "\\", letter != '"'
        elif letter == '"':
            in_text = True
        elif letter in "{[":
            stack = ("}" if letter == "{" else "]") + stack
        elif letter in "}]":
            stack = stack[1:]
    for middle in ("", '"', '":0', ":0", "0", '"":0', '0"'):
        yield middle + stack
        yield '"' + middle + stack


SCHEMA = {"text": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "object"}}
NOTE = read_tools(
    [
        {
            "type": "function",
            "function": {"name": "note", "parameters": {"type": "object", "properties": SCHEMA}},
        }
    ]
)


def test_qwen3_xml(dice: random.Random) -> None:
    tried = 0
    while tried < 5000:
        calls = []
        for _ in range(dice.randrange(3)):
            text = random_text(dice).replace("</", "").replace("\x01", "")
            values = {"text": text, "count": dice.randrange(99), "deep": {"a": [random_text(dice)]}}
            keys = dice.sample(list(values), dice.randrange(4))
            if "</parameter>" not in json.dumps(values):
                calls.append(("note", {key: values[key] for key in keys}))
        written = "So.\n" if calls else "So."
        for name, arguments in calls:
            written += f"<tool_call>\n<function={name}>\n"
            for key, value in arguments.items():
                shown = value if isinstance(value, str) else json.dumps(value)
                written += f"<parameter={key}>\n{shown}\n</parameter>\n"
            written += "</function>\n</tool_call>\n"
        for pieces in cuts(dice, written):
            tried += 1
            found = read(FAMILIES["qwen3_xml"], pieces, NOTE)
            assert found.calls == calls, pieces
            assert found.content == "So."


def test_qwen3_xml_half_written(dice: random.Random) -> None:
    written = '<tool_call>\n<function=note>\n<parameter=text>\na"b\n</parameter>\n<parameter=count>'
    for end in range(len(written)):
        text = written[:end]
        whole = read(FAMILIES["qwen3_xml"], [text], NOTE)
        assert read(FAMILIES["qwen3_xml"], list(text), NOTE).same(whole)
        assert not any(whole.ended)
        assert whole.names == (["note"] if "note>" in text else [])
        assert whole.content == ("" if whole.names else text)
    untyped = "<function=f><parameter=a>12</parameter><parameter=b>x y</parameter></function>"
    assert read(FAMILIES["qwen3_xml"], [untyped]).calls == [("f", {"a": 12, "b": "x y"})]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": True, "b": None}', {"a": True, "b": None}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": [1, 2, ],}', {"a": [1, 2]}),
        (r'{"a": "\d\'"}', {"a": r"\d'"}),
        (r'{"a": "\ud83d\ude00\ud83d"}', {"a": "\U0001f600\ufffd"}),
        (r'{"a": "\ude00\u00e9\u12"}', {"a": "\ufffdé\\u12"}),
        ('"{\\"a\\": 1}"', {"a": 1}),
        ("null", {}),
        ('""', {}),
    ],
)
def test_what_is_mended(written: str, meant: Any) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    for pieces in ([text], list(text)):
        assert read(FAMILIES["hermes"], pieces).calls == [("f", meant)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"nome": "f"}</tool_call>'),
        ("hermes", "<tool_call> none </tool_call>"),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}'),
        ("hermes", "<tool_call"),
        ("llama3_json", '{"name": "Ann", "age": 3}'),
        ("llama3_json", '{"name": "Ann"}'),
        ("llama3_json", 'Say {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] what is this"),
        ("mistral", "[TOOL_CALLS]f"),
        ("deepseek_v3", f"{ds.CALLS_BEGIN}{ds.CALL_BEGIN}function{ds.SEPARATOR}f\nno fence"),
        ("deepseek_v31", f"{ds.CALLS_BEGIN}{ds.CALL_BEGIN}f"),
        ("qwen3_xml", "<tool_call>{}</tool_call>"),
        ("qwen3_xml", "<function=two words>"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    for pieces in ([text], list(text)):
        found = read(FAMILIES[name], pieces)
        assert (found.content, found.names) == (text, [])


def test_a_broken_call_keeps_what_was_sent_and_is_not_ended() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": 12x}}</tool_call> Hm'
    found = read(FAMILIES["hermes"], [text])
    assert (found.arguments, found.ended) == (['{"a": '], [False])
    assert found.content == "12x}}</tool_call> Hm"


def test_only_the_first_call_if_no_parallel_ones_are_wanted() -> None:
    text = hermes(random.Random(1), "", [("f", {"a": 1}), ("g", {})])
    assert read(FAMILIES["hermes"], [text], only_first=True).calls == [("f", {"a": 1})]


@pytest.mark.parametrize("name", FAMILIES)
def test_forced_calls_are_read_back(name: str, dice: random.Random) -> None:
    family = FAMILIES[name]
    calls = [("note", {"text": random_text(dice), "deep": {"a": 1}}), ("note", {})]
    begin, end = family.marks(NOTE[0])
    written = family.separator.join(begin + json.dumps(one) + end for _, one in calls)
    for pieces in cuts(dice, written):
        found = read(family, pieces, NOTE, forced=True)
        assert found.calls == calls
        assert found.content == ""
    lengths = {len(id_) for id_ in found.ids}
    assert lengths == ({9} if name == "mistral" else {29})


def test_families_are_known_by_their_templates() -> None:
    assert family_of("auto", "{{ '<tool_call>' }}") is FAMILIES["hermes"]
    assert family_of("auto", "<tool_call><function=") is FAMILIES["qwen3_xml"]
    assert family_of("auto", "[TOOL_CALLS]") is FAMILIES["mistral"]
    assert family_of("auto", ds.CALLS_BEGIN + "```json") is FAMILIES["deepseek_v3"]
    assert family_of("auto", ds.CALLS_BEGIN) is FAMILIES["deepseek_v31"]
    assert family_of("auto", "<|start_header_id|>") is FAMILIES["llama3_json"]
    assert family_of(None, "<|im_start|>") is None
    assert family_of("hermes", "") is FAMILIES["hermes"]
    newer = family_of("mistral", "[TOOL_CALLS] [ARGS]")
    assert newer is not None
    assert newer.marks(NOTE[0]) == ("[TOOL_CALLS]note[ARGS]", "")
