"""Whatever is drawn where a grammar allows it meets the demand: an oracle of its own judges."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import numpy as np
import pytest

from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.exclusive import exclude
from octavo.grammar.matcher import Follower, Grammars
from octavo.grammar.request import Preamble, StructuralTag, StructuredOutputs, Tag
from octavo.types import Grammar
from tests.grammar.parts import CALL, CALL_END, END, Words, random_schema, vocabulary

WORDS = Words()
SIZE = len(WORDS.bytes_table) + 37  # a model has more logits than there are tokens
BLANKS = re.compile(r'"(?:[^"\\]|\\.)*"|(\s+)')


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(vocabulary())
    yield made
    made.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(vocabulary(), SIZE, 2)
    yield made
    made.close()


def grammar_of(compiler: GrammarCompiler, **demand: Any) -> Grammar:
    form = compiler.compile(StructuredOutputs(**demand))
    return Grammar(form.text, (END,), form.json)


def allowed(grammars: Grammars, follower: Follower) -> list[int]:
    words, failed = grammars.masks([follower])
    assert not failed
    bits = np.unpackbits(words[0].view(np.uint8), bitorder="little")
    return list(map(int, np.flatnonzero(bits)))


def walk(grammars: Grammars, grammar: Grammar, draw: random.Random, most: int = 600) -> list[int]:
    """Ids drawn evenly, with a liking for the end; what is left is finished by its shortest way."""
    follower = grammars.follow(grammar, [])
    ids: list[int] = []
    while len(ids) < most:
        tokens = allowed(grammars, follower)
        assert tokens, WORDS.text(ids)
        assert max(tokens) < len(WORDS.bytes_table)
        token = END if END in tokens and draw.random() < 0.3 else draw.choice(tokens)
        if len(ids) > 60:  # towards the end: close what is open
            token = min(tokens, key=lambda t: (t != END, WORDS.bytes_table[t] not in b'"}]', t))
        ids.append(token)
        if token == END:
            return ids
        follower.append(token)
    raise AssertionError(f"no end: {WORDS.text(ids)!r}")


def longest_blank(text: str) -> int:
    return max((len(found.group(1) or "") for found in BLANKS.finditer(text)), default=0)


@pytest.mark.parametrize("_", range(40))
def test_random_schemas(compiler: GrammarCompiler, grammars: Grammars, _: int) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    schema = random_schema(draw)
    grammar = grammar_of(compiler, json=schema if draw.random() < 0.5 else json.dumps(schema))
    ids = walk(grammars, grammar, draw)
    text = WORDS.text(ids)
    try:
        value = json.loads(text, parse_constant=lambda word: pytest.fail(word))
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {schema} gave {text!r}") from error
    assert longest_blank(text) <= 25, f"seed {seed}: {text!r}"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_many_random_schemas(compiler: GrammarCompiler, grammars: Grammars, part: int) -> None:
    for _ in range(100):
        test_random_schemas(compiler, grammars, part)


def test_a_schema_without_limits_bounds_numbers_and_blanks(
    compiler: GrammarCompiler, grammars: Grammars
) -> None:
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    grammar = grammar_of(compiler, json={})
    digits = [token for token, word in enumerate(WORDS.bytes_table) if word.isdigit()]
    for start in (b"1", b"[-1", b'{"a":0.', b'{"1111111111111111111111111111111":5e', b"[3,1e-"):
        ids = list(start)
        follower = grammars.follow(grammar, ids)
        for _ in range(40):
            tokens = [token for token in allowed(grammars, follower) if token in digits]
            if not tokens:
                break
            ids.append(draw.choice(tokens))
            follower.append(ids[-1])
        text = WORDS.text(ids)
        run = len(text) - len(text.rstrip("0123456789"))
        assert 1 <= run <= 24, f"seed {seed}: {text}"
        assert "e" not in text or run <= 2


@pytest.mark.parametrize(
    "marks",
    [
        [{"const": 0}, {"const": 1}, {"const": 2.5}],
        [{"enum": [1, 2]}, {"enum": [3, "1"]}],
        [{"type": "string"}, {"type": "integer"}],
        [{"const": True}, {"const": 1}],
    ],
)
def test_one_of_schemas_told_apart_by_a_property(
    compiler: GrammarCompiler, grammars: Grammars, marks: list[dict[str, object]]
) -> None:
    parts = [
        {"type": "object", "properties": {"k": mark, f"v{i}": {"type": "null"}}, "required": ["k"]}
        for i, mark in enumerate(marks)
    ]
    for schema in ({"oneOf": parts}, {"oneOf": marks}):
        grammar = grammar_of(compiler, json=schema)
        for seed in range(6):
            value = json.loads(WORDS.text(walk(grammars, grammar, random.Random(seed))))
            jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)


def test_what_may_be_one_value_does_not_exclude_each_other() -> None:
    one = {"type": "object", "properties": {"k": {"const": 1}}, "required": ["k"]}
    assert exclude(one, {**one, "properties": {"k": {"const": 2}}})
    for other in (
        {**one, "properties": {"k": {"const": 1.0}}},
        {**one, "required": []},
        {"type": "object"},
        {"$ref": "#"},
        True,
    ):
        assert not exclude(one, other), other
    loose = [{"properties": {"k": {"const": i}}, "required": ["k"]} for i in range(2)]
    assert not exclude(*loose), "both allow whatever is no object"
    assert exclude(one, {**one, "properties": {"k": {"const": 2}}})
    assert not exclude({"type": "integer"}, {"type": "number"})
    assert not exclude({"const": {"a": 1, "b": [2]}}, {"const": {"b": [2.0], "a": 1}})
    assert exclude({"const": True}, {"const": 1})


def test_compact_json_has_no_blanks(compiler: GrammarCompiler, grammars: Grammars) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 5}
    grammar = grammar_of(compiler, json=schema, disable_any_whitespace=True)
    for seed in range(5):
        text = WORDS.text(walk(grammars, grammar, random.Random(seed)))
        assert " " not in text
        assert "\n" not in text


def test_named_properties_are_all_there_is(compiler: GrammarCompiler, grammars: Grammars) -> None:
    """Unless the schema speaks of others."""
    named = {"type": "object", "properties": {"a": {"type": "null"}}}
    closed = grammar_of(compiler, json=named)
    opened = grammar_of(compiler, json={**named, "additionalProperties": True})
    more = b'{"a":null,"b'
    assert not begins(grammars, closed, more)
    assert begins(grammars, opened, more)
    stricter = grammar_of(
        compiler, json={**named, "additionalProperties": True}, disable_additional_properties=True
    )
    assert not begins(grammars, stricter, more)


def begins(grammars: Grammars, grammar: Grammar, start: bytes) -> bool:
    follower = grammars.follow(grammar, [])
    for byte in start:
        words = {WORDS.bytes_table[token][:1] for token in allowed(grammars, follower)}
        if bytes([byte]) not in words:
            return False
        follower.append(byte)
    return True


@pytest.mark.parametrize(
    "pattern",
    [r"\d{3}-[a-f]+", "(ab|cd){2,3}", "[^a-z]{4}", "ж+|漢{2}", "a?b?c", r"\w{2}\s\w", "^x.y$"],
)
def test_expressions(compiler: GrammarCompiler, grammars: Grammars, pattern: str) -> None:
    grammar = grammar_of(compiler, regex=pattern)
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    for _ in range(10):
        text = WORDS.text(walk(grammars, grammar, draw))
        assert re.fullmatch(pattern, text), f"seed {seed}: {text!r}"


def test_choices(compiler: GrammarCompiler, grammars: Grammars) -> None:
    choices = ["yes", "yes, but", "naïve 🦉", 'quo"te\\', "line\nbreak\x7f", "<|end|>", " "]
    grammar = grammar_of(compiler, choice=choices)
    draw = random.Random()
    found = {WORDS.text(walk(grammars, grammar, draw)) for _ in range(120)}
    assert found == set(choices)


@pytest.mark.parametrize(
    "grammar",
    [
        'start: greeting " " NAME\ngreeting: "hi" | "hello"\nNAME: /[a-z]{2,5}/',
        'root ::= greeting " " name\ngreeting ::= "hi" | "hello"\n'
        "name ::= [a-z] [a-z] [a-z]? [a-z]? [a-z]?",
    ],
)
def test_grammars(compiler: GrammarCompiler, grammars: Grammars, grammar: str) -> None:
    made = grammar_of(compiler, grammar=grammar)
    for _ in range(10):
        text = WORDS.text(walk(grammars, made, random.Random()))
        assert re.fullmatch("(hi|hello) [a-z]{2,5}", text), text


CALLED = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}}
TAGS = [Tag(begin="<fn=a>", schema=CALLED, end="</fn>"), Tag(begin="<fn=b>", end="</fn>")]


def test_tags_in_free_text(compiler: GrammarCompiler, grammars: Grammars) -> None:
    free = grammar_of(compiler, structural_tag=StructuralTag(tags=TAGS, triggers=["<fn="]))
    for start, then in (
        (b"hi", None),
        (b"hi <fn", None),
        (b"hi <fn=", {b"a", b"b"}),
        (b"hi <fn=a", {b">"}),
        (b'<fn=a>{"n', {b'"'}),
        (b'<fn=a>{"n":3}', {b"<"}),
        (b'<fn=a>{"n":3}</fn> and <fn=b>[1]</fn>', None),
    ):
        follower = grammars.follow(free, list(start))
        tokens = allowed(grammars, follower)
        firsts = {WORDS.bytes_table[token][:1] for token in tokens}
        if then is None:
            assert {b"z", b"<", b"\n"} <= firsts, start
            assert END in tokens
        else:
            assert END not in tokens
            assert firsts == then, start


def test_tags_alone(compiler: GrammarCompiler, grammars: Grammars) -> None:
    one = StructuralTag(tags=TAGS[:1], free_text=False, at_least_one=True, stop_after_first=True)
    grammar = grammar_of(compiler, structural_tag=one)
    text = WORDS.text(walk(grammars, grammar, random.Random()))
    found = re.fullmatch(r"<fn=a>(.*)</fn>", text, re.DOTALL)
    assert found
    jsonschema.validate(json.loads(found.group(1)), CALLED)
    several = StructuralTag(tags=TAGS[:1], free_text=False, separator="\n")
    grammar = grammar_of(compiler, structural_tag=several)
    assert END in allowed(grammars, grammars.follow(grammar, []))
    follower = grammars.follow(grammar, list(b"<fn=a>{}</fn>"))
    assert {END, ord("\n")} <= set(allowed(grammars, follower))
    assert ord("<") not in allowed(grammars, follower)


def test_special_tokens_open_and_close_a_tag(compiler: GrammarCompiler, grammars: Grammars) -> None:
    tag = Tag(begin="<|call|>f", schema=CALLED, end="<|call_end|>")
    free = StructuralTag(tags=[tag], triggers=["<|call|>"])
    grammar = grammar_of(compiler, structural_tag=free)
    assert CALL in allowed(grammars, grammars.follow(grammar, list(b"so ")))
    assert CALL_END not in allowed(grammars, grammars.follow(grammar, list(b"so ")))
    after = grammars.follow(grammar, [*b"so ", CALL])
    assert {WORDS.bytes_table[token][:1] for token in allowed(grammars, after)} == {b"f"}
    assert allowed(grammars, grammars.follow(grammar, [CALL, *b"f{}"])) == [CALL_END]


def test_a_form_after_a_thought(compiler: GrammarCompiler, grammars: Grammars) -> None:
    preamble = Preamble(end="</think>", begin="<think>")
    grammar = grammar_of(compiler, choice=["yes", "no"], preamble=preamble)
    for start, possible in (
        (b"", b"yn<"),
        (b"<think>", b"qz<\n"),
        (b"<think>so</think>", b"yn\n"),
        (b"<think>so</think>\n\nn", b"o"),
    ):
        tokens = allowed(grammars, grammars.follow(grammar, list(start)))
        firsts = {WORDS.bytes_table[token][0] for token in tokens}
        assert set(possible) <= firsts, start
        assert (ord("z") in firsts) == (ord("z") in possible)
        assert END not in tokens


def test_following_anew_is_following_on(compiler: GrammarCompiler, grammars: Grammars) -> None:
    """A sequence that was preempted is where it was, whatever its neighbours in the call are."""
    seed = random.randrange(2**31)
    draw = random.Random(seed)
    grammar = grammar_of(compiler, json=random_schema(draw, depth=4))
    ids = walk(grammars, grammar, draw)[:-1]
    followers = [grammars.follow(grammar, ids[:length]) for length in range(len(ids) + 1)]
    words, failed = grammars.begin(followers).result()
    assert not failed
    along = grammars.follow(grammar, [])
    for length, mask in enumerate(words):
        assert np.array_equal(grammars.masks([along])[0][0], mask), f"seed {seed} at {length}"
        if length < len(ids):
            along.append(ids[length])


def test_a_follower_that_fails_does_so_alone(compiler: GrammarCompiler, grammars: Grammars) -> None:
    grammar = grammar_of(compiler, choice=["yes"])
    good, bad = grammars.follow(grammar, [ord("y")]), grammars.follow(grammar, [ord("q")])
    words, failed = grammars.masks([good, bad])
    assert list(failed) == [1]
    assert words[0].any()
