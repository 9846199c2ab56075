"""Text to ids and back, for byte-level and SentencePiece vocabularies."""

from __future__ import annotations

import asyncio

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from octavo.errors import CheckpointError, InvalidRequest
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import THREAD_FROM, Tokenizer, byte_letters
from tests.text.samples import SPECIAL, byte_level, chat_tokenizer, sentencepiece, with_changes

CHAT = chat_tokenizer()
LEGACY = Tokenizer(sentencepiece(), bos_id=1, eos_ids=[2])
FIRST = Tokenizer(sentencepiece(legacy=False), bos_id=1, eos_ids=[2])
METASPACE = Tokenizer(sentencepiece(legacy=False, decoder="first"), bos_id=1, eos_ids=[2])
ALL = (CHAT, LEGACY, FIRST, METASPACE)
IDS = st.lists(st.integers(0, 10**6), max_size=40)
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40)


def some_ids(tokenizer: Tokenizer, numbers: list[int]) -> list[int]:
    return [number % tokenizer.vocab_size for number in numbers]


@given(IDS, st.booleans())
def test_byte_level_decoding_is_the_library_s(numbers, skip):
    ids = some_ids(CHAT, numbers)
    assert CHAT.decode(ids, skip) == CHAT.backend.decode(ids, skip_special_tokens=skip)


@given(TEXT)
def test_round_trip(text):
    assert CHAT.decode(CHAT.encode_plain(text)) == text
    assert LEGACY.decode(LEGACY.encode_plain(text)) == text.replace("▁", " ")


@given(st.text(alphabet="abcPT 🦉é", max_size=30))
def test_sentencepiece_decoding_is_the_library_s_for_valid_text(text):
    for tokenizer in (LEGACY, FIRST):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer.backend.decode(ids)
        # The later kind takes a first space for the one that it would have put there.
        assert tokenizer.decode(ids) == text.removeprefix("" if tokenizer is LEGACY else " ")


@given(IDS, st.lists(st.integers(1, 5)), st.booleans(), st.booleans(), st.sampled_from(ALL))
def test_stream_equals_whole(numbers, sizes, skip, inside, tokenizer):
    ids = some_ids(tokenizer, numbers)
    stream = Detokenizer(tokenizer, skip_special_tokens=skip, inside=inside)
    joined, place = "", 0
    for size in [*sizes, *[1] * len(ids)]:
        joined += stream.push(ids[place : place + size])
        place += size
    joined += stream.flush()
    assert joined == tokenizer.decode(ids, skip, inside=inside)
    assert stream.flush() == ""


@given(TEXT)
def test_valid_text_never_shows_a_replacement(text):
    stream = Detokenizer(CHAT, inside=False)
    ids = CHAT.encode_plain(text)
    done = ""
    for token in ids:
        done += stream.push([token])
        assert text.startswith(done)
    assert done == text
    assert stream.flush() == ""


def test_a_cut_character_shows_at_the_end_only():
    ids = CHAT.encode("🦌")
    assert len(ids) > 1
    stream = Detokenizer(CHAT)
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == "\ufffd"
    assert b"".join(map(CHAT.token_bytes, ids)).decode() == "🦌"
    assert "\ufffd" in CHAT.token_text(ids[0])


def test_padded_ids_are_no_text():
    beyond = CHAT.vocab_size + 5
    assert CHAT.token_bytes(beyond) == b""
    assert CHAT.token_bytes(-1) == b""
    assert CHAT.decode([beyond, -1]) == ""
    stream = Detokenizer(CHAT)
    assert stream.push([beyond]) == stream.push([beyond, beyond]) == ""


def test_first_space_is_stripped_only_from_a_whole_text():
    ids = LEGACY.encode("Paris")
    assert ids == [LEGACY.backend.token_to_id("▁Paris")]
    assert LEGACY.decode(ids) == "Paris"
    assert LEGACY.decode(ids, inside=True) == " Paris"
    assert Detokenizer(LEGACY).push(ids) == " Paris"
    assert Detokenizer(LEGACY, inside=False).push(ids) == "Paris"
    never = Tokenizer(sentencepiece(legacy=False, decoder="never"))
    assert never.decode(ids) == " Paris"


def test_token_bytes():
    owl = LEGACY.encode("🦉")
    assert b"".join(map(LEGACY.token_bytes, owl)) == b" \xf0\x9f\xa6\x89"
    assert LEGACY.token_bytes(LEGACY.backend.token_to_id("<0xE9>")) == b"\xe9"
    assert LEGACY.token_bytes(LEGACY.backend.token_to_id("▁▁▁")) == b"   "
    assert CHAT.token_bytes(2) == b"<|im_end|>"
    assert CHAT.token_bytes(CHAT.backend.token_to_id("  added  ")) == b"  added  "
    assert len(byte_letters()) == 256 == len(set(byte_letters().values()))


def test_later_parts_get_no_first_word_space():
    backend = sentencepiece(legacy=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(),
            pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False),
        ]
    )
    tokenizer = Tokenizer(backend)
    for text in ("<s>a</s>is", "a<s>is 2a"):
        assert tokenizer.encode_guarded(text, str) == tokenizer.encode(text)
    first, later = tokenizer.encode_plain("a"), tokenizer.encode_plain("a", inside=True)
    assert (tokenizer.decode(first, inside=True), tokenizer.decode(later, inside=True)) == (
        " a",
        "a",
    )


def test_special_texts():
    text = "A<|im_end|>B"
    assert 2 in CHAT.encode(text)
    plain = CHAT.encode_plain(text)
    assert not CHAT.special_ids & set(plain)
    assert CHAT.decode(plain) == text
    assert CHAT.decode(CHAT.encode(text)) == "AB"
    assert CHAT.decode(CHAT.encode(text), False) == text
    assert CHAT.find_special(text)
    assert not CHAT.find_special("<|im_end|")
    assert CHAT.replace_special(text, lambda found: f"[{len(found)}]") == "A[10]B"
    assert 2 in CHAT.special_ids
    assert 40 not in CHAT.special_ids
    assert CHAT.eos_ids == (2,)


def test_ids_named_special_by_the_model_are_special():
    added = CHAT.backend.token_to_id("  added  ")
    tokenizer = chat_tokenizer(special_ids=[added])
    assert added in tokenizer.special_ids
    assert added not in tokenizer.encode_plain("x  added  y")
    assert added in CHAT.encode_plain("x  added  y")
    assert tokenizer.decode([added]) == ""


def test_without_special_tokens():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert not tokenizer.find_special("a")
    assert tokenizer.replace_special("a", str.upper) == "a"
    assert tokenizer.encode_guarded("b", str) == [1]
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.token_bytes(1) == b" b"
    backend.add_special_tokens(["<s>"])
    assert Tokenizer(backend).decode([0, 2, 1], False) == backend.decode([0, 2, 1], False)


def test_start_token_is_added_once():
    assert CHAT.encode("Hi") == CHAT.encode("Hi", add_special_tokens=False)
    adding = chat_tokenizer(add_bos=True)
    assert adding.encode("Hi") == [1, *CHAT.encode("Hi")]
    assert adding.encode("<|im_start|>Hi") == CHAT.encode("<|im_start|>Hi")
    assert adding.encode("Hi", add_special_tokens=False) == CHAT.encode("Hi")
    assert adding.encode("") == [1]
    backend = byte_level()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    assert Tokenizer(backend, bos_id=1).encode("Hi") == [1, *CHAT.encode("Hi")]
    assert not Tokenizer(backend).add_bos
    assert Tokenizer(backend).encode("Hi") == CHAT.encode("Hi")


@pytest.mark.parametrize("text", ["a\ud800", "\udfff", "ok \ud83e"])
def test_half_a_surrogate_pair_is_refused(text):
    for encode in (CHAT.encode, CHAT.encode_plain):
        with pytest.raises(InvalidRequest, match="surrogate"):
            encode(text)
    with pytest.raises(InvalidRequest, match="surrogate"):
        CHAT.encode_guarded(text, str)
    assert CHAT.decode(CHAT.encode("a\0b")) == "a\0b"


async def test_long_texts_leave_the_event_loop_free():
    long = "The capital of France is 🦉. " * (THREAD_FROM // 10)
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    ids = await CHAT.encode_async(long)
    ticking.cancel()
    assert ticks > 1
    assert ids == CHAT.backend.encode(long, add_special_tokens=False).ids
    assert await CHAT.encode_async("short") == CHAT.encode("short")


@given(TEXT, st.integers(1, 200))
def test_the_quick_lower_bound_is_one(text, times):
    assert CHAT.at_least(text * times) <= len(CHAT.encode(text * times))


@given(st.lists(st.sampled_from(["a", " Paris", "is ", "<s>", "</s>", "é"]), max_size=8))
def test_guarded_encoding_without_secrets_is_encoding(parts):
    text = "".join(parts)
    for tokenizer in (CHAT, LEGACY, FIRST):
        assert tokenizer.encode_guarded(text, str) == tokenizer.encode(text, False)


@pytest.mark.parametrize(("left", "right"), [(False, True), (True, False), (True, True)])
def test_special_tokens_that_eat_the_blanks_around_them(left, right):
    backend = byte_level()
    backend.add_special_tokens([tokenizers.AddedToken("<|x|>", lstrip=left, rstrip=right)])
    tokenizer = Tokenizer(backend)
    for text in ("a  <|x|>  b", "<|x|> ", " <|x|><|x|> c", "a <|im_end|> <|x|> <|im_end|> b"):
        assert tokenizer.encode_guarded(text, str) == tokenizer.encode(text), text


def test_unknown_decoders_are_refused():
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match="WordPiece"):
        Tokenizer(backend, name="here")


def test_letters_outside_the_byte_alphabet_stand_for_themselves():
    backend = tokenizers.Tokenizer(models.BPE({"語": 0, "Ġa": 1}, []))
    backend.decoder = decoders.ByteLevel()
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1]) == backend.decode([0, 1]) == "語 a"


def test_truncation_of_the_file_is_turned_off():
    backend = byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    assert Tokenizer(backend).encode("a b c d") == CHAT.encode("a b c d")


def test_empty_vocabulary():
    assert Tokenizer(tokenizers.Tokenizer(models.BPE())).vocab_size == 0


def test_from_checkpoint():
    class Special:
        ids, eos_ids, bos_id, add_bos, named = frozenset({1, 2}), (2,), 1, True, {"bos_token": "x"}

    class Checkpoint:
        path = "a/folder"

        def load_tokenizer(self):
            return byte_level()

        def special_tokens(self, tokenizer):
            assert tokenizer.token_to_id(SPECIAL[1]) == 1
            return Special

    tokenizer = Tokenizer.from_checkpoint(Checkpoint())
    assert tokenizer.encode("Hi")[0] == 1
    assert (tokenizer.eos_ids, tokenizer.named) == ((2,), {"bos_token": "x"})
    assert tokenizer.name == "a/folder"


def test_no_lower_bound_where_tokens_can_swallow_text():
    blanks = byte_level()
    blanks.add_special_tokens([tokenizers.AddedToken("<|x|>", rstrip=True)])
    split = with_changes(byte_level())
    split.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    removed = with_changes(byte_level())
    removed.pre_tokenizer = pre_tokenizers.Split("-", "removed")
    unknown = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    stripped = with_changes(byte_level())
    stripped.normalizer = normalizers.Strip()
    squeezed = with_changes(byte_level())
    squeezed.normalizer = normalizers.Replace(tokenizers.Regex(" +"), "")
    for backend, text in (
        (blanks, "<|x|>" + " " * 10_000),
        (split, " " * 10_000),
        (removed, "-" * 10_000),
        (unknown, "b" * 10_000),
        (stripped, " " * 10_000),
        (squeezed, " " * 10_000),
    ):
        tokenizer = Tokenizer(backend)
        assert len(tokenizer.encode(text)) < 3
        assert tokenizer.at_least(text) == 0
    assert CHAT.at_least("ab" * 10_000) > 100
    assert LEGACY.at_least("ab" * 10_000) > 100


def test_normalizing_vocabularies_keep_a_lower_bound():
    backend = with_changes(byte_level())
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(backend)
    text = "e\u0301" * 300
    assert tokenizer.at_least(text) <= len(tokenizer.encode(text))
