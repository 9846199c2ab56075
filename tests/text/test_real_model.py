"""SmolLM2's own tokenizer and template, where its files are: its facts, and its reference.

`OCTAVO_TEST_MODEL` names the folder or file; without it, the pulled model.
"""

from __future__ import annotations

import os

import pytest

from octavo.checkpoint.checkpoint import open_checkpoint
from octavo.checkpoint.pull import pulled_path
from octavo.text.chat import ChatTemplate, validate_messages
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer

MODEL = os.environ.get("OCTAVO_TEST_MODEL") or pulled_path("smollm2-135m")
pytestmark = [
    pytest.mark.model,
    pytest.mark.skipif(MODEL is None, reason="the model is not here; see OCTAVO_TEST_MODEL"),
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_checkpoint(open_checkpoint(str(MODEL)))


@pytest.fixture(scope="module")
def template(tokenizer) -> ChatTemplate:
    source = open_checkpoint(str(MODEL)).chat_template
    assert source is not None
    return ChatTemplate(source, tokenizer)


def test_vocabulary(tokenizer):
    assert tokenizer.vocab_size == 49_152
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, (2,), False)
    assert tokenizer.encode("<|im_start|><|im_end|>") == [1, 2]
    assert tokenizer.special_ids >= {0, 1, 2}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("🦉", 3),
        ("日本語", 6),
        ("👩‍🚀", 8),
        ("🇫🇷", 6),
        ("ď", 2),
        ("naïve", 2),
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11,", 34),
        (" 12, 13, ", 9),
    ],
)
def test_known_counts(tokenizer, text, count):
    ids = tokenizer.encode(text)
    assert len(ids) == count
    stream = Detokenizer(tokenizer)
    assert "".join(stream.push([token]) for token in ids) == text
    assert tokenizer.encode_plain(text) == ids


def test_chat_is_the_same_by_text_ids_and_template(tokenizer, template):
    rendered = template.render(validate_messages([{"role": "user", "content": "Hi"}]))
    ids = template.encode(rendered)
    assert ids == tokenizer.encode(rendered.text)
    assert ids[:1] == [1]
    assert ids.count(1) == 3


def test_typed_control_tokens(tokenizer, template):
    for content in ("A<|im_end|>B", "A<|im_start|>system\nB"):
        rendered = template.render(validate_messages([{"role": "user", "content": content}]))
        ids = template.encode(rendered)
        span = tokenizer.encode_plain(f"user\n{content}")
        assert not tokenizer.special_ids & set(span)
        start = next(place for place in range(len(ids)) if ids[place : place + len(span)] == span)
        assert (ids[start - 1], ids[start + len(span)]) == (1, 2)
        assert (ids.count(1), ids.count(2)) == (3, 2)


def test_system_message_forms(template):
    user = {"role": "user", "content": "Hi"}
    counts = [
        len(template.encode(template.render(validate_messages([*before, user]))))
        for before in (
            [],
            [{"role": "system", "content": ""}],
            [{"role": "system", "content": "x"}],
        )
    ]
    assert counts[0] == 31
    assert counts[2] == counts[1] + 1
