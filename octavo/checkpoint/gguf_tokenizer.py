"""Builds a `tokenizers.Tokenizer` from the vocabulary inside a GGUF file.

Two kinds: "gpt2", byte-level BPE, where `tokenizer.ggml.pre` says how text is cut before merging
(getting that wrong gives no error, only other tokens, so an unknown value is refused); and
"llama", SentencePiece BPE with scores and byte fallback.
Not for: tokenizer.json (`folder.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.checkpoint.affixes import set_affixes
from octavo.checkpoint.gguf_file import GgufFile, StringArray, read_gguf
from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
UNKNOWN, CONTROL, USER_DEFINED, BYTE = 2, 3, 4, 6
SPACE = "\u2581"

GPT2_SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut before merging: by each pattern in turn, every match a piece of its own."""

    splits: tuple[str, ...]
    ignore_merges: bool = False  # a whole piece in the vocabulary is a token, merges or not
    normalizer: str = ""
    add_bos: bool = False  # where the file does not say


DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", GPT2_SPLIT))
GPT2 = PreTokenizer((GPT2_SPLIT,))
LLAMA3 = PreTokenizer((LLAMA3_SPLIT,), ignore_merges=True, add_bos=True)
QWEN2 = PreTokenizer((QWEN2_SPLIT,), normalizer="NFC")
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    # Files older than the field cut at punctuation first, then like GPT-2, then digits by three.
    "default": PreTokenizer(
        (r"[\p{P}\$\+<=>\^~\|]+", GPT2_SPLIT, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ),
    "gpt-2": GPT2,
    "smollm": DIGITS_THEN_GPT2,
    "starcoder": DIGITS_THEN_GPT2,
    "refact": DIGITS_THEN_GPT2,
    "command-r": DIGITS_THEN_GPT2,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "llama-bpe": LLAMA3,
    "qwen2": QWEN2,
    "deepseek-r1-qwen": QWEN2,
    "tekken": PreTokenizer((TEKKEN_SPLIT,), ignore_merges=True, add_bos=True),
}


def tokenizer_of_file(path: Path) -> Tokenizer:
    """The tokenizer of a GGUF file. Raises CheckpointError if it has none or one not known."""
    return build_tokenizer(read_gguf(path))


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The same from a parsed header."""
    source = _Source(file)
    kind = file.metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer, add_bos = _byte_level(source)
    elif kind == "llama":
        tokenizer, add_bos = _sentencepiece(source), True
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model is {kind!r}; only 'gpt2' (byte-level BPE) and "
            "'llama' (SentencePiece BPE) are supported"
        )
    _add_tokens(tokenizer, source)
    first = source.affix("bos", default=add_bos)
    last = source.affix("eos", default=False)
    set_affixes(tokenizer, first, last)
    return tokenizer


class _Source:
    """The tokenizer's part of the metadata, checked."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.tokens = self.strings("tokens")
        self.types: list[int] = file.metadata.get("tokenizer.ggml.token_type") or []
        if self.types and len(self.types) != len(self.tokens):
            raise self.error(f"{len(self.types)} token types for {len(self.tokens)} tokens")

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: broken tokenizer: {what}")

    def strings(self, key: str) -> list[str]:
        value = self.file.metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, StringArray):
            raise self.error(f"tokenizer.ggml.{key} is missing or not an array of strings")
        return value.decode()

    def vocabulary(self) -> dict[str, int]:
        """Token to id; where a text occurs twice the first id is the one that encoding gives."""
        vocabulary: dict[str, int] = {}
        for number, token in enumerate(self.tokens):
            vocabulary.setdefault(token, number)
        return vocabulary

    def affix(self, name: str, default: bool) -> str | None:
        """Text of the begin or end token if the file says that encoding adds it."""
        wanted = self.file.metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        number = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
        if not wanted or number is None:
            return None
        if type(number) is not int or not 0 <= number < len(self.tokens):
            raise self.error(f"{name}_token_id is {number!r} of {len(self.tokens)} tokens")
        return self.tokens[number]


def _byte_level(source: _Source) -> tuple[Tokenizer, bool]:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    name = source.file.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{source.file.path}: tokenizer.ggml.pre is {name!r}, a way of cutting text that is "
            f"not known here; known are {', '.join(PRE_TOKENIZERS)}. Use the model's Hugging "
            "Face folder instead"
        )
    rules = PRE_TOKENIZERS[name]
    merges = []
    for merge in source.strings("merges"):
        # The separator is a space; a token itself never holds one, as bytes are spelled.
        left, separator, right = merge.partition(" ")
        if not separator:
            raise source.error(f"merge {merge!r} is not a pair")
        merges.append((left, right))
    try:
        model = models.BPE(source.vocabulary(), merges, ignore_merges=rules.ignore_merges)
    except Exception as error:  # the library raises bare Exception
        raise source.error(str(error)) from error
    tokenizer = Tokenizer(model)
    if rules.normalizer == "NFC":
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in rules.splits
    ]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, rules.add_bos


def _sentencepiece(source: _Source) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = source.file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(source.tokens):
        raise source.error("tokenizer.ggml.scores is missing or of another length than tokens")
    vocabulary = source.vocabulary()
    number = source.file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    unknown = source.tokens[number] if number < len(source.tokens) else None
    merges = merges_of_scores(vocabulary, scores)
    try:
        model = models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    except Exception as error:  # the library raises bare Exception
        raise source.error(str(error)) from error
    tokenizer = Tokenizer(model)
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    replace = normalizers.Replace(" ", SPACE)
    if source.file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), replace])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = replace
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def merges_of_scores(vocabulary: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to make a piece out of two others; pieces of higher score merge first.

    SentencePiece has no list of merges: it joins the neighbours whose union scores best.
    """
    found: list[tuple[float, int, int, str, str]] = []
    for piece, number in vocabulary.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocabulary and right in vocabulary:
                score = scores[number]
                found.append((-score, vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_tokens(tokenizer: Tokenizer, source: _Source) -> None:
    """Control tokens are special; user-defined ones are found in text but stay visible."""
    from tokenizers import AddedToken

    special_types = (CONTROL, UNKNOWN)
    added = [
        AddedToken(token, special=kind in special_types, normalized=False)
        for token, kind in zip(source.tokens, source.types, strict=False)
        if kind in special_types or kind == USER_DEFINED
    ]
    if added:
        tokenizer.add_tokens(added)
    if len(set(source.tokens)) != tokenizer.get_vocab_size():
        raise source.error("an added token got an id of its own")
