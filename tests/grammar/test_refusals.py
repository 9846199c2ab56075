"""Demands that cannot be met, cannot be enforced, or cost too much: refused in two seconds.

Each refusal names the field, and what is wrong; the next demand is served as ever.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from octavo.errors import InvalidRequest, Overloaded, RequestFailed
from octavo.grammar import checker as checker_module
from octavo.grammar import compiler as module
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.request import StructuralTag, StructuredOutputs, Tag, structured_outputs
from tests.grammar.parts import random_schema, vocabulary

OBJECT: dict[str, Any] = {"type": "object"}


def nested(levels: int, keyword: str = "items") -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        if keyword == "items":
            schema = {"type": "array", "items": schema}
        else:
            schema = {keyword: [schema]}
    return schema


def deep(levels: int) -> list[Any]:
    """A value."""
    return [deep(levels - 1)] if levels else []


def numbered(number: float) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"const": number}}, "required": ["a"]}


# What a message must say, and the schema.
SCHEMAS: list[tuple[str, Any]] = [
    ("type", {"type": "strin"}),
    ("string", {"type": "strin"}),
    ("type", {"type": []}),
    ("type", {"type": 5}),
    ("type", {"type": ["string", "nil"]}),
    ("$ref", {"$ref": "#/nowhere"}),
    ("$ref", {"$ref": 5}),
    ("$ref", {"$ref": "https://example.org/schema"}),
    ("$ref", {"$ref": "#name", "$defs": {"a": {"$anchor": "name"}}}),
    ("regex", {"type": "string", "pattern": "("}),
    ("pattern", {"type": "string", "pattern": ""}),
    ("pattern", {"type": "string", "pattern": 5}),
    ("look", {"type": "string", "pattern": "(?=a)b"}),
    ("look", {"type": "string", "pattern": r"\bword"}),
    ("properties", {"type": "object", "properties": []}),
    ("/properties/a", {"type": "object", "properties": {"a": 3}}),
    ("required", {"type": "object", "required": "a"}),
    ("required", {"type": "object", "required": [1]}),
    ("required", {**OBJECT, "required": ["a"], "properties": {}, "additionalProperties": False}),
    ("no finite answer", {**OBJECT, "required": ["a"], "properties": {"a": False}}),
    ("no finite answer", False),
    ("no finite answer", {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    ("no finite answer", {**OBJECT, "properties": {"a": {"$ref": "#"}}, "required": ["a"]}),
    ("no finite answer", {"type": "array", "items": {"$ref": "#"}, "minItems": 1}),
    ("no finite answer", {"type": "array", "prefixItems": [False], "minItems": 1}),
    ("no finite answer", {"anyOf": [False, {"$ref": "#"}]}),
    ("no finite answer", {"allOf": [{"type": "string"}, False]}),
    ("anyOf", {"anyOf": []}),
    ("anyOf", {"anyOf": {}}),
    ("allOf", {"allOf": [3]}),
    ("incompatible", {"allOf": [{"type": "string"}, {"type": "integer"}]}),
    ("oneOf", {"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 5}]}),
    ("enum", {"enum": []}),
    ("enum", {"enum": "a"}),
    ("enum", {"enum": list(range(30_000))}),
    ("enforced", {"type": "string", "enum": [1, 2]}),
    ("minLength", {"type": "string", "minLength": 5, "maxLength": 2}),
    ("minLength", {"type": "string", "minLength": -1}),
    ("minLength", {"type": "string", "minLength": 1.5}),
    ("maxLength", {"type": "string", "maxLength": 10**9}),
    ("minItems", {"type": "array", "minItems": 3, "maxItems": 2}),
    ("minItems", {"type": "array", "minItems": True}),
    ("minProperties", {"type": "object", "minProperties": 2, "maxProperties": 1}),
    ("minimum", {"type": "integer", "minimum": 5, "maximum": 3}),
    ("minimum", {"type": "integer", "minimum": "3"}),
    ("maximum", {"type": "integer", "maximum": 10**40}),
    ("no JSON", {"const": "\ud800"}),
    ("maximum", {"type": "integer", "maximum": 1e40}),
    ("exclusiveMinimum", {"type": "integer", "exclusiveMinimum": True}),
    ("multipleOf", {"type": "integer", "multipleOf": 0}),
    ("multipleOf", {"type": "integer", "multipleOf": -2}),
    ("multipleOf", {"type": "integer", "multipleOf": 9_999_999}),
    ("multipleOf", {"type": "number", "multipleOf": 1e-12}),
    ("format", {"type": "string", "format": "verse"}),
    ("format", {"type": "string", "format": 3}),
    ("additionalProperties", {"type": "object", "additionalProperties": "no"}),
    ("nullable", {"type": "string", "nullable": True}),
    ("maxLength", {"type": "string", "maxLenght": 3}),
    ("nested too deep", nested(100)),
    ("nested too deep", nested(2000)),
    ("nested too deep", nested(61)),
    ("nested too deep", {"const": deep(150)}),
    ("required property", {"oneOf": [numbered(1), {"type": "object"}]}),
    ("nested too deep", nested(100, "anyOf")),
    ("too wide", {"anyOf": [{} for _ in range(25_000)]}),
    ("too large", {"description": "x" * 2**19}),
    ("use at most 480", {**OBJECT, "properties": {f"p{i}": True for i in range(3000)}}),
    ("as an object", []),
    ("no JSON schema", "{"),
    ("no JSON schema", ""),
]
SCHEMAS += [
    (keyword, {"type": "object", keyword: value})
    for keyword, value in {
        "not": {"type": "string"},
        "if": {},
        "then": {},
        "else": {},
        "uniqueItems": True,
        "contains": {},
        "propertyNames": {},
        "dependentRequired": {},
        "dependentSchemas": {},
        "dependencies": {},
        "unevaluatedProperties": False,
        "unevaluatedItems": False,
        "contentEncoding": "base64",
        "contentMediaType": "text/plain",
        "$dynamicRef": "#a",
        "$anchor": "a",
        "minContains": 1,
    }.items()
]
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("regex", {"regex": ""}),
    ("unclosed", {"regex": "("}),
    ("regex", {"regex": "[z-a]"}),
    ("regex", {"regex": "(?<=a)b"}),
    ("regex", {"regex": "a{1000000}"}),
    ("regex", {"regex": "((((((a{1,99}){1,99}){1,99}){1,99}){1,99}){1,99}"}),
    ("regex", {"regex": "(" * 30_000 + ")" * 30_000}),
    ("no answer", {"regex": r"[^\s\S]"}),
    ("empty one", {"regex": "^$"}),
    ("too long", {"regex": "a" * 70_000}),
    ("choice", {"choice": []}),
    ("choice", {"choice": ["a", ""]}),
    ("choice", {"choice": "a"}),
    ("choice", {"choice": ["a", 3]}),
    ("choice", {"choice": ["a"] * 2000}),
    ("grammar", {"grammar": ""}),
    ("grammar", {"grammar": "start: <nope>"}),
    ("grammar", {"grammar": "start: missing"}),
    ("grammar", {"grammar": "begin: /a/"}),
    ("grammar", {"grammar": 'start: "a" start'}),
    ("grammar", {"grammar": "start: start"}),
    ("grammar", {"grammar": "root ::= ("}),
    ("grammar", {"grammar": "root ::= other"}),
    ("grammar", {"grammar": "start: " + "(" * 2000 + '"a"' + ")" * 2000}),
    ("grammar", {"grammar": '{"grammars": []}'}),
    ("keywords pass", {"grammar": '%llguidance {"lenient": true}\nstart: "a"'}),
    (
        "Too many items",
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(40))
         + '\nr40: "a"'},
    ),
    ("exactly one", {}),
    ("exactly one", {"regex": "a", "choice": ["a"]}),
    ("not a known field", {"regexp": "a"}),
    ("whitespace_pattern", {"json": {}, "whitespace_pattern": " *"}),
    ("disable_any_whitespace", {"regex": "a", "disable_any_whitespace": True}),
    ("json_object", {"json_object": 3}),
    ("structural_tag", {"structural_tag": {"tags": []}}),
    ("triggers", {"structural_tag": {"tags": [{"begin": "<a>", "end": ""}], "triggers": ["<b"]}}),
    ("structural_tag", {"structural_tag": {"format": {"type": "sequence"}}}),
    ("preamble", {"regex": "a", "preamble": {"end": "x"}}),
]  # fmt: skip
EVERY = [*((says, {"json": schema}) for says, schema in SCHEMAS), *OTHERS]


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary())
    made.compile(StructuredOutputs(choice=["a"]))  # starts the process
    yield made
    made.close()


@pytest.mark.parametrize(
    ("says", "demand"),
    EVERY,
    ids=map(str, range(len(EVERY))),
)
def test_refused(compiler: GrammarCompiler, says: str, demand: dict[str, Any]) -> None:
    begun = time.monotonic()
    with pytest.raises(InvalidRequest) as error:
        compiler.compile(structured_outputs(demand))
    assert time.monotonic() - begun < 10, "far more than the two seconds of a quiet machine"
    assert says in error.value.message
    assert error.value.param == "structured_outputs"
    assert len(error.value.message) < 600
    assert compiler.compile(StructuredOutputs(choice=["a"])).text


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/%24defs/a%20b", "$defs": {"a b": {"type": "null"}}},
        {"type": "array", "items": {"type": "null"}, "uniqueItems": False, "maxItems": 2},
        nested(60),
        {**OBJECT, "properties": {f"p{i}": True for i in range(480)}},
    ],
    ids=range(4),
)
def test_not_refused(compiler: GrammarCompiler, schema: Any) -> None:
    assert compiler.compile(StructuredOutputs(json=schema)).json


def test_schemas_in_tags_are_checked_as_others_are(compiler: GrammarCompiler) -> None:
    tag = Tag(begin="<a>", end="</a>", schema={"type": "object", "uniqueItems": True})
    with pytest.raises(InvalidRequest, match="uniqueItems"):
        compiler.compile(
            StructuredOutputs(structural_tag=StructuralTag(tags=[tag], free_text=False))
        )


def test_the_whole_table_is_refused_by_many_at_once() -> None:
    compiler = GrammarCompiler(vocabulary())

    schemas = [schema for _, schema in SCHEMAS if not isinstance(schema, list)]
    random.shuffle(schemas)
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda schema: refusal(compiler, schema), schemas))
    compiler.close()


@pytest.mark.parametrize("_", range(60))
def test_schemas_with_a_fault_somewhere(compiler: GrammarCompiler, _: int) -> None:
    """A random schema, in which one value has become another: refused, or compiled."""
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    schema = random_schema(draw, depth=4)
    places = list(_places(schema))
    if not places:
        return
    holder, key = draw.choice(places)
    faults = [None, -1, 2.5, "x", [], {}, [None], True, 10**30, "\ud800", {"$ref": "#"}, {"a": []}]
    holder[key] = draw.choice(faults)
    message = refusal(compiler, schema)
    assert "too large or nested" not in message, f"seed {seed}: the process died"


def refusal(compiler: GrammarCompiler, schema: Any) -> str:
    try:
        compiler.compile(StructuredOutputs(json=schema))
    except InvalidRequest as error:
        return error.message
    return ""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in items:
        yield value, key
        if isinstance(item, (dict, list)):
            yield from _places(item)


def test_what_takes_too_long_is_ended_and_others_go_on(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh = StructuredOutputs(choice=[str(random.random())])
    slow = StructuredOutputs(json=json.dumps({"enum": [str(i) for i in range(9000)]}))
    for lane in (compiler._quick, compiler._slow):
        monkeypatch.setattr(lane, "seconds", 0.001)
    with pytest.raises(InvalidRequest, match="seconds to compile"):
        compiler.compile(slow)
    monkeypatch.undo()
    assert compiler.compile(fresh).text
    assert compiler.known(slow) is None, "another moment may judge differently"


HEAVY = "({letter}{{1000}}){{1000}}"  # takes more time than there is


def test_demands_that_take_long_do_not_hold_up_others(compiler: GrammarCompiler) -> None:
    heavy = [StructuredOutputs(regex=HEAVY.format(letter=letter)) for letter in "abcdefghij"]
    futures = [compiler.submit(demand) for demand in heavy]
    begun = time.process_time()
    good = [
        compiler.submit(StructuredOutputs(choice=[f"{number} {random.random()}"]))
        for number in range(8)
    ]
    assert all(future.result(60).text for future in good)
    ahead = sum(future.done() for future in futures)
    assert ahead < len(heavy), "those that take long must not all have been waited for"
    ends = [future.exception(60) for future in futures]
    kinds = {type(end) for end in ends}
    assert kinds == {InvalidRequest, Overloaded}, ends
    assert sum(isinstance(end, InvalidRequest) for end in ends) < len(heavy) / 2
    assert all(end.retry_after >= 1 for end in ends if isinstance(end, Overloaded))
    assert time.process_time() - begun < 1, "nothing is compiled in this process"


def test_time_is_of_the_processor(compiler: GrammarCompiler) -> None:
    """A process that does not get to run is not late: its time counts when it works."""
    checkers = [compiler._quick._free[-1]]
    pids = [checker._process.pid for checker in checkers]
    demand = StructuredOutputs(choice=[str(random.random())])
    future = None
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        future = compiler._quick._threads.submit(compiler._quick.judge, demand)
        time.sleep(2 * module.QUICK_SECONDS)
        assert not future.done()
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    verdict = future.result(30)
    assert verdict is not None
    assert verdict.form is not None


def test_a_busy_machine_is_no_fault_of_the_demand(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = StructuredOutputs(choice=[str(random.random())])
    monkeypatch.setattr(checker_module, "WALL_SECONDS", 0.0)
    with pytest.raises(Overloaded, match="too busy"):
        compiler.compile(demand)
    monkeypatch.undo()
    assert compiler.compile(demand).text


def test_a_process_that_died_is_replaced(compiler: GrammarCompiler) -> None:
    compiler.compile(StructuredOutputs(choice=[str(random.random())]))
    for checker in compiler._quick._free:
        checker._process.kill()
        checker._process.wait()
    assert compiler.compile(StructuredOutputs(choice=[str(random.random())])).text


def test_verdicts_are_remembered_within_limits(compiler: GrammarCompiler) -> None:
    for number in range(module.REMEMBERED + 20):
        demand = StructuredOutputs(choice=[f"choice {number}"])
        assert compiler.compile(demand) == compiler.known(demand)
    assert len(compiler._known) <= module.REMEMBERED
    assert compiler.known(StructuredOutputs(choice=["choice 0"])) is None


def test_a_process_that_does_not_start_is_no_fault_of_the_demand(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    demand = StructuredOutputs(choice=[str(random.random())])
    monkeypatch.setattr(checker_module, "START_SECONDS", 0.0)
    fresh = GrammarCompiler(vocabulary())
    with pytest.raises(RequestFailed, match="did not start"):
        fresh.compile(demand)
    monkeypatch.undo()
    assert fresh.compile(demand).text, "what failed for that reason must not be remembered"
    fresh.close()


def test_all_that_compiles_is_remembered(compiler: GrammarCompiler) -> None:
    """Who starts a sequence looks its grammar up in the event loop, and must not wait for it."""
    text = "words " * (module.MAX_DEMAND // 24) + str(random.random())
    schema = {"type": "object", "description": text}
    for count in (3, 10):
        tags = [Tag(begin=f"<{i}>", end="", schema=schema) for i in range(count)]
        demand = StructuredOutputs(structural_tag=StructuralTag(tags=tags, free_text=False))
        if count == 3:
            assert compiler.compile(demand) == compiler.known(demand)
            continue
        with pytest.raises(InvalidRequest, match=r"structural_tag: .* use at most") as error:
            compiler.compile(demand)
        assert error.value.param == "structured_outputs"
