"""Tokenizers out of GGUF files against plain merging, written out here without any library."""

from __future__ import annotations

import random
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from tokenizers import Tokenizer

from octavo.checkpoint.gguf_file import read_gguf
from octavo.checkpoint.gguf_tokenizer import SPACE, build_tokenizer
from octavo.errors import CheckpointError
from tests.checkpoint.toys import ToyGguf, expect_error, fresh_seed

PIECES = [
    *(
        "a",
        "b",
        "c",
        "the",
        "cat",
        "THE",
        "don't",
        "I'LL",
        "it's",
        "we'Ve",
        "1",
        "12",
        "123",
        "12345",
        "²",
        "Ⅷ",
        "١٢",
        "é",
        "é",
        "日本語",
        "😀",
        "👩\u200d👩\u200d👧",
    ),
    *(" ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000"),
    *(".", ",", "...", "!?", "$=+", "_", "|", "<|x|>", "#include", "/", "\\"),
    *("\n\n1", "    2", "a  5", " 7", "\u0301"),
]
CASES = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
PATTERNS = {
    "smollm": [r"\p{N}", GPT2],
    "gpt-2": [GPT2],
    "llama-bpe": [
        CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "qwen2": [
        CASES + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(spare)) for byte in range(256)]


ALPHABET = byte_alphabet()


def random_text(rng: random.Random) -> str:
    parts = []
    for _ in range(rng.randrange(0, 14)):
        if rng.random() < 0.85:
            parts.append(rng.choice(PIECES))
        else:
            code = rng.choice([rng.randrange(32, 0x2FFF), rng.randrange(0x1F300, 0x1F900)])
            parts.append(chr(code))
    return "".join(parts)


def cut(text: str, patterns: list[str]) -> list[str]:
    """Each pattern in turn cuts every piece into its matches and what lies between."""
    pieces = [text]
    for pattern in patterns:
        finer: list[str] = []
        for piece in pieces:
            position = 0
            for match in regex.finditer(pattern, piece):
                finer += [piece[position : match.start()], match.group()]
                position = match.end()
            finer.append(piece[position:])
        pieces = [piece for piece in finer if piece]
    return pieces


def merge(symbols: list[str], ranks: dict[tuple[str, str], float]) -> list[str]:
    """Joins the best pair, the leftmost of equals, until none is left."""
    while True:
        pairs = list(pairwise(symbols))
        known = [(ranks[pair], index) for index, pair in enumerate(pairs) if pair in ranks]
        if not known:
            return symbols
        _, index = min(known)
        symbols = [*symbols[:index], symbols[index] + symbols[index + 1], *symbols[index + 2 :]]


def spell(text: str) -> list[str]:
    return [ALPHABET[byte] for byte in text.encode()]


def learned_vocabulary(rng: random.Random) -> tuple[list[str], list[str]]:
    """A vocabulary whose merges cross every boundary that a wrong cut would leave open."""
    symbols = list(ALPHABET)
    merges: list[str] = []
    texts = [spell(random_text(rng)) for _ in range(400)]
    ranks: dict[tuple[str, str], float] = {}
    for _ in range(250):
        text = rng.choice(texts)
        merged = merge(text, ranks)
        if len(merged) < 2:
            continue
        at = rng.randrange(len(merged) - 1)
        pair = (merged[at], merged[at + 1])
        if "".join(pair) in symbols:
            continue
        ranks[pair] = len(ranks)
        merges.append(" ".join(pair))
        symbols.append("".join(pair))
    # Whole pieces that no merges lead to.
    symbols += sorted({"Ġthe", "cat", "123", "12", "ĠTHE", "Ċ"} - set(symbols))
    return symbols, merges


def build(toy: ToyGguf, path: Path) -> Tokenizer:
    return build_tokenizer(read_gguf(toy.write(path, {})))


@pytest.mark.parametrize("pre", sorted(PATTERNS))
def test_byte_level_tokenizers(pre: str, tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    symbols, merges = learned_vocabulary(rng)
    toy = ToyGguf(vocabulary=tuple(symbols), merges=tuple(merges), pre=pre, bos=None, eos=None)
    tokenizer = build(toy, tmp_path / "a.gguf")
    ranks = {tuple(text.split(" ")): float(rank) for rank, text in enumerate(merges)}
    ids = {symbol: number for number, symbol in enumerate(symbols)}
    for _ in range(400):
        text = random_text(rng)
        plain = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
        expected: list[int] = []
        for piece in cut(plain, PATTERNS[pre]):
            spelled = spell(piece)
            whole = "".join(spelled)
            known = pre == "llama-bpe" and whole in ids
            expected += [ids[one] for one in ([whole] if known else merge(spelled, ranks))]
        assert tokenizer.encode(text).ids == expected, repr(text)
        assert tokenizer.decode(expected) == plain


def test_pre_tokenizers_differ_where_they_should(tmp_path: Path) -> None:
    """The vocabulary above can tell them apart: merges over digits and spaces."""
    symbols = [*ALPHABET, "12", "ĊĊ", "ĠĠ"]
    toy = ToyGguf(vocabulary=tuple(symbols), merges=("1 2", "Ċ Ċ", "Ġ Ġ"), bos=None, eos=None)
    smollm = build(toy, tmp_path / "a.gguf")
    assert smollm.encode("12").tokens == ["1", "2"]
    assert smollm.encode("\n\n1").tokens == ["ĊĊ", "1"]
    assert smollm.encode("  2").tokens == ["ĠĠ", "2"]
    toy.pre = "gpt-2"
    gpt2 = build(toy, tmp_path / "b.gguf")
    assert gpt2.encode("12").tokens == ["12"]
    assert gpt2.encode("\n\n1").tokens == ["Ċ", "Ċ", "1"]


def test_a_missing_pre_is_the_default_and_an_unknown_one_is_refused(tmp_path: Path) -> None:
    symbols = tuple(ALPHABET)
    toy = ToyGguf(vocabulary=symbols, merges=("a b",), bos=None, eos=None)
    toy.vocabulary += ("ab",)
    toy.pre = None
    assert build(toy, tmp_path / "a.gguf").encode("ab").tokens == ["ab"]
    toy.pre = "some-new-one"
    with pytest.raises(CheckpointError) as caught:
        build(toy, tmp_path / "b.gguf")
    expect_error(caught, "'some-new-one'", "smollm", "qwen2")


def test_control_and_user_tokens(tmp_path: Path) -> None:
    symbols = (*ALPHABET, "<s>", "</s>", "<tool>")
    types = (*[1] * 256, 3, 3, 4)
    extra = (("add_add_bos_token", (True,)),)
    toy = ToyGguf(vocabulary=symbols, types=types, merges=("< s",), bos=256, eos=257, extra=extra)
    toy.vocabulary += ("<s",)
    toy.types += (1,)
    tokenizer = build(toy, tmp_path / "a.gguf")
    assert tokenizer.encode("a<tool></s>").tokens == ["<s>", "a", "<tool>", "</s>"]
    assert tokenizer.encode("a", add_special_tokens=False).ids == [ord("a")]
    ids = tokenizer.encode("a<tool></s>").ids
    assert tokenizer.decode(ids) == "a<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a<tool></s>"


def sentencepiece_toy(rng: random.Random) -> ToyGguf:
    """Byte tokens, characters, and unions with scores by order, as training leaves them."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [2, 3, 3, *[6] * 256]
    scores = [0.0] * len(pieces)
    characters = [SPACE, *"abcdeghtTHEC0123456789.,'日本é"]
    unions: list[str] = []
    while len(unions) < 120:
        union = rng.choice([*characters, *unions]) + rng.choice([*characters, *unions])
        if union not in unions and len(union) < 9:
            unions.append(union)
    for rank, piece in enumerate([*unions, *characters]):
        pieces.append(piece)
        types.append(1)
        scores.append(-float(rank))
    return ToyGguf(
        model="llama",
        pre=None,
        vocabulary=tuple(pieces),
        types=tuple(types),
        scores=tuple(scores),
    )


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_tokenizers(prefix: bool, tmp_path: Path) -> None:
    rng = random.Random(fresh_seed())
    toy = sentencepiece_toy(rng)
    toy.extra = (("add_add_space_prefix", (prefix,)),)
    tokenizer = build(toy, tmp_path / "a.gguf")
    ids = {piece: number for number, piece in enumerate(toy.vocabulary)}
    ranks: dict[tuple[str, str], float] = {}
    for piece, score in zip(toy.vocabulary, toy.scores, strict=True):
        for at in range(1, len(piece)):
            if piece[:at] in ids and piece[at:] in ids:
                ranks[piece[:at], piece[at:]] = -score
    for _ in range(400):
        text = random_text(rng).replace(SPACE, "")
        text += "".join(rng.choices(" abcdeghtTHEC0123456789.,", k=rng.randrange(30)))
        marked = (SPACE if prefix and text else "") + text.replace(" ", SPACE)
        expected = [1]
        for symbol in merge(list(marked), ranks):
            if symbol in ids:
                expected.append(ids[symbol])
            else:
                expected += [3 + byte for byte in symbol.encode()]
        assert tokenizer.encode(text).ids == expected, repr(text)
        assert tokenizer.decode(expected) == text


@pytest.mark.parametrize(
    ("toy", "part"),
    [
        (ToyGguf(model="bert"), "'bert'"),
        (ToyGguf(model="llama"), "scores"),
        (ToyGguf(types=(1, 2)), "token types"),
        (ToyGguf(merges=("nopair",)), "'nopair'"),
        (ToyGguf(merges=("x y",)), "x"),
    ],
)
def test_broken_tokenizers_are_refused(toy: ToyGguf, part: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        build(toy, tmp_path / "a.gguf")
    expect_error(caught, str(tmp_path / "a.gguf"), part)
