"""Checkpoint and TensorEntry: what was found on disk, whatever the file format.

Not for: reading tensors into memory (`weights/tensors.py`) or finding the files (`checkpoint.py`).
Next file: `checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from octavo.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Kind: TypeAlias = Literal["hf", "gguf"]
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Encoding:
    """How numbers lie in a file: `block` weights take `size` bytes."""

    name: str
    block: int
    size: int


ENCODINGS: dict[str, Encoding] = {
    encoding.name: encoding
    for encoding in (
        Encoding("F64", 1, 8),
        Encoding("F32", 1, 4),
        Encoding("F16", 1, 2),
        Encoding("BF16", 1, 2),
        Encoding("F8_E4M3", 1, 1),
        Encoding("F8_E5M2", 1, 1),
        Encoding("I64", 1, 8),
        Encoding("I32", 1, 4),
        Encoding("I16", 1, 2),
        Encoding("I8", 1, 1),
        Encoding("U8", 1, 1),
        Encoding("BOOL", 1, 1),
        Encoding("Q4_0", 32, 18),
        Encoding("Q4_1", 32, 20),
        Encoding("Q5_0", 32, 22),
        Encoding("Q5_1", 32, 24),
        Encoding("Q8_0", 32, 34),
        Encoding("Q2_K", 256, 84),
        Encoding("Q3_K", 256, 110),
        Encoding("Q4_K", 256, 144),
        Encoding("Q5_K", 256, 176),
        Encoding("Q6_K", 256, 210),
    )
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies: `nbytes` bytes at `offset` of `file`, row-major.

    `shape` is in Hugging Face order, (out, in). If `interleaved_heads` is not 0, the rows of each
    of that many heads are stored as rotary pairs (0, half, 1, half + 1, ...) and the reader puts
    them back into two halves. `plus` is added to each number, in f32.
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    encoding: str
    interleaved_heads: int = 0
    plus: float = 0.0


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens with a meaning of their own.

    `add_bos`: encoding a text with special tokens puts `bos_id` in front of it. `ids` are all
    tokens that decoding leaves out on request; `texts` maps their text to their id.
    """

    bos_id: int | None
    eos_ids: tuple[int, ...]  # the first is the tokenizer's or config's main one
    pad_id: int | None
    unk_id: int | None
    add_bos: bool
    ids: frozenset[int]
    texts: dict[str, int]
    named: dict[str, str]  # "bos_token" -> its text, as chat templates expect them


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """An opened model. Nothing of its weights is in memory.

    `config` and `generation` are as in config.json and generation_config.json; for a GGUF file
    they are made from its metadata. `chat_template` is the default one; `chat_templates` holds
    all by name where a model has several.
    """

    path: Path  # folder, or GGUF file
    kind: Kind
    name: str
    config: dict[str, Any]
    generation: dict[str, Any]
    chat_template: str | None
    tensors: dict[str, TensorEntry] = field(repr=False)
    chat_templates: dict[str, str] = field(default_factory=dict, repr=False)
    tokenizer_config: dict[str, Any] = field(default_factory=dict, repr=False)

    def load_tokenizer(self) -> Tokenizer:
        """A new `tokenizers.Tokenizer`. Raises CheckpointError if there is none or it is broken."""
        if self.kind == "gguf":
            from octavo.checkpoint.gguf_tokenizer import tokenizer_of_file

            return tokenizer_of_file(self.path)
        from octavo.checkpoint.folder import load_folder_tokenizer

        return load_folder_tokenizer(self.path, self.tokenizer_config)

    def special_tokens(self, tokenizer: Tokenizer) -> SpecialTokens:
        """The special tokens, with `tokenizer` from `load_tokenizer`."""
        named = {
            key: text
            for key in SPECIAL_NAMES
            if (text := token_text(self.tokenizer_config.get(key))) is not None
        }
        bos_id = self._id_of("bos_token", named, tokenizer)
        texts = {
            token.content: number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        more = self.tokenizer_config.get("additional_special_tokens") or []
        for text in [*named.values(), *filter(None, map(token_text, more))]:
            number = tokenizer.token_to_id(text)
            if number is not None:
                texts[text] = number
        encoded = tokenizer.encode("").ids
        return SpecialTokens(
            bos_id=bos_id,
            eos_ids=self._eos_ids(named, tokenizer),
            pad_id=self._id_of("pad_token", named, tokenizer),
            unk_id=self._id_of("unk_token", named, tokenizer),
            add_bos=bos_id is not None and encoded[:1] == [bos_id],
            ids=frozenset(texts.values()),
            texts=texts,
            named=named,
        )

    def _id_of(self, key: str, named: dict[str, str], tokenizer: Tokenizer) -> int | None:
        if key in named:
            number = tokenizer.token_to_id(named[key])
            if number is None:
                raise CheckpointError(
                    f"{self.path}: tokenizer_config names {key} {named[key]!r}, "
                    "which the tokenizer does not have"
                )
            return int(number)
        return next(iter(_ids(self.config.get(f"{key}_id"))), None)

    def _eos_ids(self, named: dict[str, str], tokenizer: Tokenizer) -> tuple[int, ...]:
        main = self._id_of("eos_token", named, tokenizer)
        others = _ids(self.generation.get("eos_token_id")) or _ids(self.config.get("eos_token_id"))
        ids = others if main is None else (main, *others)
        return tuple(dict.fromkeys(ids))


def token_text(value: object) -> str | None:
    """tokenizer_config.json writes a token as a string or as {"content": ...}."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: object) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,)
    if isinstance(value, list):
        return tuple(item for item in value if isinstance(item, int))
    return ()
