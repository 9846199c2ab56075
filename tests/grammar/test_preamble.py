"""A form that holds for what follows a thought: the thought is free, the rest is not."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import InvalidRequest
from octavo.grammar.forms import form_of
from octavo.grammar.request import Preamble, StructuralTag, StructuredOutputs, Tag
from octavo.grammar.vocabulary import new_matcher, open_vocabulary, special_texts, vocabulary_of
from tests.text.samples import chat_tokenizer

TOKENIZER = chat_tokenizer()
VOCABULARY = vocabulary_of(TOKENIZER)
OPENED = open_vocabulary(VOCABULARY)
SPECIAL = special_texts(VOCABULARY)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMS: list[dict[str, Any]] = [
    {"json": SCHEMA},
    {"regex": r'\{"a": [0-9]+\}'},
    {"choice": ["yes", '{"a": 12}']},
    {"structural_tag": StructuralTag(tags=[Tag(begin="", end="", schema=SCHEMA)], free_text=False)},
]


def follows(wanted: StructuredOutputs, text: str) -> bool:
    """True if the grammar takes all of the text and may end there."""
    matcher = new_matcher(OPENED, form_of(wanted, SPECIAL).text)
    assert not matcher.is_error(), matcher.get_error()
    ids = TOKENIZER.encode_plain(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: next(iter(form)))
def test_the_form_holds_after_the_thought(form: dict[str, Any]) -> None:
    always = StructuredOutputs(**form, preamble=Preamble(end="</think>"))
    for thought in ("", "Hm.\n", '{"b": 2} < / </thin', "日本語 🦉\n\n"):
        for between in ("", "\n\n"):
            assert follows(always, f'{thought}</think>{between}{{"a": 12}}')
            assert not follows(always, f'{thought}</think>{between}{{"b": 12}}')
    assert not follows(always, '{"a": 12}')
    maybe = StructuredOutputs(**form, preamble=Preamble(end="</think>", begin="<think>"))
    assert follows(maybe, '<think>\nHm.\n</think>\n\n{"a": 12}')
    assert follows(maybe, '{"a": 12}')
    assert not follows(maybe, 'Hm.</think>{"a": 12}')
    assert not follows(maybe, '<think>Hm.</think>{"b": 12}')


def test_marks_may_be_special_tokens() -> None:
    wanted = StructuredOutputs(choice=["yes"], preamble=Preamble(end="<|im_start|>"))
    matcher = new_matcher(OPENED, form_of(wanted, SPECIAL).text)
    assert not matcher.is_error(), matcher.get_error()
    ids = [*TOKENIZER.encode_plain("Hm."), 1, *TOKENIZER.encode_plain("yes")]
    assert matcher.try_consume_tokens(ids) == len(ids)
    assert matcher.is_accepting()


def test_callers_do_not_set_it() -> None:
    with pytest.raises(InvalidRequest, match="preamble"):
        StructuredOutputs(regex="a", preamble={"end": "x"})  # type: ignore[arg-type]
