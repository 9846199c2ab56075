"""Every kind of tokenizer, cut token by token: the text of the whole, and bytes that join to it."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable
from functools import cache

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers

from octavo.sampling_params import SamplingParams
from octavo.text.assembler import Assembler
from octavo.text.detokenizer import Detokenizer
from octavo.text.tokenizer import Tokenizer
from octavo.types import SequenceOutput, TokenLogprobs
from tests.text.samples import CORPUS, byte_level, sentencepiece

# How Llama 3 and Qwen cut a text before merging.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PIECES = [
    *("👩‍🚀", "🇫🇷", "🦉", "👨‍👩‍👧‍👦", "👍🏽", "é", "e\u0301", "n\u0303", "\u0301", "日本語"),
    *("한국어", "한국", "עברית"),
    *("العربية", "ไทย", "नमस्ते", "ﬁ", "½", "\u200d", "\ufeff", "\ufffd", "\0", "\t"),
    *("\n", "\r\n", "  ", " "),
    *("a", "Paris", "it's", "1234", "naïve", "<|x", "▁", "\U0010ffff", "\u00a0", "�"),
]  # fmt: skip
ROUNDS = 400


def tiktoken_like(*, composed: bool = False) -> tokenizers.Tokenizer:
    """As Llama 3's; `composed` as Qwen's, which normalizes first."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=not composed))
    if composed:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens(["<|begin|>", "<|eot|>"])
    return backend


def unigram() -> tokenizers.Tokenizer:
    """As T5's or Gemma's kind: pieces with scores, bytes for what has none."""
    words = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    words += [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    words += [("▁", -3.0), *((letter, -5.0) for letter in "abcdefghijklmnopqrstuvwxyzP1234'")]
    words += [("▁the", -4.0), ("▁Paris", -6.0), ("日本", -6.0), ("▁▁", -4.5), ("é", -7.0)]
    backend = tokenizers.Tokenizer(models.Unigram(words, unk_id=0, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


BYTE_KINDS: dict[str, Callable[[], tokenizers.Tokenizer]] = {
    "byte-level": byte_level,
    "llama 3": tiktoken_like,
    "qwen": lambda: tiktoken_like(composed=True),
}
KINDS = BYTE_KINDS | {
    "sentencepiece": sentencepiece,
    "mistral": lambda: sentencepiece(legacy=False),
    "metaspace": lambda: sentencepiece(legacy=False, decoder="first"),
    "unigram": unigram,
}
every_kind = pytest.mark.parametrize("kind", KINDS)


@cache
def made(kind: str) -> Tokenizer:
    return Tokenizer(KINDS[kind](), eos_ids=[2])


def dice_of() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def text_of(dice: random.Random) -> str:
    parts = dice.choices(PIECES, k=dice.randrange(1, 12))
    parts += [
        chr(dice.choice([number for number in (dice.randrange(0x110000),) if number >> 11 != 27]
                        or [65]))
        for _ in range(dice.randrange(4))
    ]  # fmt: skip
    dice.shuffle(parts)
    return "".join(parts)


def ids_of(dice: random.Random, tokenizer: Tokenizer) -> list[int]:
    """Any ids: parts of characters in any order, special tokens, ids beyond the table."""
    return [dice.randrange(tokenizer.vocab_size + 2) for _ in range(dice.randrange(1, 24))]


@every_kind
def test_a_text_comes_back_token_by_token(kind: str) -> None:
    tokenizer, dice = made(kind), dice_of()
    for _ in range(ROUNDS):
        text = text_of(dice)
        ids = tokenizer.encode_plain(text)
        wanted = unicodedata.normalize("NFC", text) if kind == "qwen" else text
        if kind not in BYTE_KINDS:  # there the mark for a space is a space
            wanted = wanted.replace("▁", " ")
        stream = Detokenizer(tokenizer, inside=False)
        sent = ""
        for token in ids:
            piece = stream.push([token])
            sent += piece
            if kind in BYTE_KINDS:
                assert wanted.startswith(sent), text  # never half a character, never one too many
        sent += stream.flush()
        assert sent == tokenizer.decode(ids), text
        if kind in BYTE_KINDS:
            assert sent == wanted
        else:  # some of these take a first space for their own
            assert sent.lstrip(" ") == wanted.lstrip(" "), text
            if kind != "metaspace":  # whose decoder shows byte tokens by their names
                assert sent == tokenizer.backend.decode(ids), text


@every_kind
@pytest.mark.parametrize("skip", [True, False])
def test_any_ids_are_the_same_in_any_pieces(kind: str, skip: bool) -> None:
    tokenizer, dice = made(kind), dice_of()
    for _ in range(ROUNDS):
        ids = ids_of(dice, tokenizer)
        for inside in (True, False):
            whole = tokenizer.decode(ids, skip, inside=inside)
            stream = Detokenizer(tokenizer, skip_special_tokens=skip, inside=inside)
            sent, place = "", 0
            while place < len(ids):
                size = dice.choice([1, 1, 1, 2, 5])
                sent += stream.push(ids[place : place + size])
                place += size
            assert sent + stream.flush() == whole, ids
        if kind in BYTE_KINDS:
            assert whole == tokenizer.backend.decode(ids, skip_special_tokens=skip), ids


@every_kind
@pytest.mark.parametrize("spaces", [True, False])
def test_bytes_of_log_probs_join_to_the_text(kind: str, spaces: bool) -> None:
    tokenizer, dice = made(kind), dice_of()
    for _ in range(ROUNDS // 3):
        ids = tokenizer.encode_plain(text_of(dice)) if dice.random() < 0.5 else []
        ids += ids_of(dice, tokenizer)
        stops = dice.choice([None, None, ["a"], ["é", "日本"], ["\ufffd"]])
        params = SamplingParams(
            logprobs=1,
            stop=stops,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
            spaces_between_special_tokens=spaces,
        )
        assembler = Assembler(tokenizer, params)
        text, raw, kept = "", b"", []
        for place, token in enumerate(ids):
            entry = TokenLogprobs([token, token], [-0.5, -0.5], 1)
            reason = "length" if place == len(ids) - 1 else None
            delta = assembler.push(SequenceOutput("r", [token], reason, logprobs=[entry]))
            text += delta.text
            kept += delta.token_ids
            raw += b"".join(one.raw for one in delta.logprobs or ())
            if delta.finish_reason:
                break
        assert kept == ids[: len(kept)]
        assert raw == b"".join(map(tokenizer.token_bytes, kept)), ids
        joined = raw.decode("utf-8", "replace")
        if delta.finish_reason == "stop":  # the last token may go on after the stop text
            assert joined.startswith(text), ids
            assert text.endswith(tuple(stops or ())), ids
        else:
            assert joined == text, ids
