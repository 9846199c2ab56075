"""`Tokenizer`: text to token ids and back, true to the byte.

One class over the `tokenizers` library for the two kinds of vocabulary that language models use:
byte-level BPE (GPT-2 and its heirs) and SentencePiece (Llama 2, Mistral; with or without byte
fallback). Ids to text goes through a table of bytes made once, not through the library, because
a stream needs the bytes of single tokens. Not for: streams (`detokenizer.py`), turns (`chat.py`).
Next file: `text/detokenizer.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import tokenizers

from octavo.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from octavo.checkpoint.records import Checkpoint

# Texts of this many characters and more are encoded in a thread, with the interpreter free.
THREAD_FROM = 8192

_SPACE_MARK = "\u2581"  # how SentencePiece writes a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_Kind: TypeAlias = Literal["bytes", "sentencepiece", "words"]


class Tokenizer:
    """Encodes and decodes; safe to use from several threads.

    `special_ids` adds to those that the backend marks as special. `add_bos` None asks the
    backend's post-processor. `named` holds texts of special tokens by their role ("bos_token"),
    for chat templates. Raises `CheckpointError` if the backend's decoder is of a kind that
    is not known.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_ids: Collection[int] = (),
        eos_ids: Collection[int] = (),
        bos_id: int | None = None,
        add_bos: bool | None = None,
        named: Mapping[str, str] | None = None,
        name: str = "tokenizer",
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.name = name
        self.named = dict(named or {})
        self.eos_ids = tuple(dict.fromkeys(eos_ids))
        self.bos_id = bos_id
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(special_ids) | {
            token for token, info in added.items() if info.special
        }
        if add_bos is None:
            add_bos = bos_id is not None and bos_id in backend.encode("").ids[:1]
        self.add_bos = add_bos and bos_id is not None
        decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else None
        kind = _kind(decoder, name)
        self.strips_space = _strips_space(decoder) or kind == "words"
        self.bytes_table = _bytes_table(backend, added, kind)
        skipped = self.special_ids
        self.visible_table = [
            b"" if token in skipped else data for token, data in enumerate(self.bytes_table)
        ]
        # Texts of the tokens that are whole characters, for streams; None for the others.
        self.texts = [_whole_text(data) for data in self.bytes_table]
        self.visible_texts = [
            "" if token in skipped else text for token, text in enumerate(self.texts)
        ]
        self._longest = max(map(len, self.bytes_table), default=1)
        self._specials = {
            info.content: (token, info)
            for token, info in added.items()
            if token in self.special_ids
        }
        # Longest first, as the library matches them.
        words = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, words))) if words else None
        self._plain: dict[bool, tokenizers.Tokenizer] = {}

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Tokenizer:
        """The tokenizer of an opened model; raises `CheckpointError` if it has none."""
        backend = checkpoint.load_tokenizer()
        special = checkpoint.special_tokens(backend)
        return cls(
            backend,
            special_ids=special.ids,
            eos_ids=special.eos_ids,
            bos_id=special.bos_id,
            add_bos=special.add_bos,
            named=special.named,
            name=str(checkpoint.path),
        )

    # Text to ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; texts of special tokens in it become those tokens.

        With `add_special_tokens`, a model that wants a start token gets one, unless the text
        begins with it already.
        """
        _check_text(text)
        if len(text) < THREAD_FROM:
            ids: list[int] = self.backend.encode(text, add_special_tokens=False).ids
        else:  # the batch form frees the interpreter while it works
            ids = self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if (
            add_special_tokens
            and self.add_bos
            and self.bos_id is not None
            and ids[:1] != [self.bos_id]
        ):
            ids.insert(0, self.bos_id)
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`; a long text does not hold up the event loop."""
        if len(text) < THREAD_FROM:
            return self.encode(text, add_special_tokens)
        return await asyncio.to_thread(self.encode, text, add_special_tokens)

    def encode_plain(self, text: str, *, inside: bool = False) -> list[int]:
        """Token ids of a text in which nothing is special: `<|end|>` stays these seven letters.

        `inside` says that other tokens come before, so that no first-word space is added.
        """
        _check_text(text)
        ids: list[int] = self._plain_backend(inside).encode(text, add_special_tokens=False).ids
        return ids

    def encode_guarded(self, text: str, restore: Callable[[str], str]) -> list[int]:
        """Token ids of a text in which only the special tokens that it shows now are special.

        What stands between them goes through `restore`, whose results are plain text. So what a
        user typed can be kept out of sight while the special tokens are found.
        """
        _check_text(text)
        ids: list[int] = []
        for part in self._split(text):
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += self.encode_plain(restore(part), inside=bool(ids))
        return ids

    def find_special(self, text: str) -> bool:
        """True if the text of a special token occurs in `text`."""
        return self._special_pattern is not None and bool(self._special_pattern.search(text))

    def replace_special(self, text: str, replace: Callable[[str], str]) -> str:
        """`text` with each text of a special token in it replaced."""
        if self._special_pattern is None:
            return text
        return self._special_pattern.sub(lambda match: replace(match.group()), text)

    def at_least(self, text: str) -> int:
        """A number of tokens that `text` has at least, in far less time than encoding takes.

        For refusing what cannot fit. A quarter of the bytes are allowed for normalizers, which
        may make a text shorter.
        """
        return len(text) // (4 * self._longest)

    def _split(self, text: str) -> Iterable[int | str]:
        """Ids of special tokens and the texts between them."""
        start, eat_next = 0, False
        matches = self._special_pattern.finditer(text) if self._special_pattern else ()
        for match in matches:
            token, info = self._specials[match.group()]
            between = text[start : match.start()]
            between = between.lstrip() if eat_next else between
            yield between.rstrip() if info.lstrip else between
            yield token
            start, eat_next = match.end(), info.rstrip
        yield text[start:].lstrip() if eat_next else text[start:]

    def _plain_backend(self, inside: bool) -> tokenizers.Tokenizer:
        """A copy in which special tokens are text; made when first wanted, a tenth of a second."""
        if inside not in self._plain:
            record = json.loads(self.backend.to_str())
            for entry in record["added_tokens"]:
                entry["special"] = entry["id"] in self.special_ids
            if inside:
                _never_prepend(record.get("pre_tokenizer") or {})
            copy = tokenizers.Tokenizer.from_str(json.dumps(record))
            copy.encode_special_tokens = True
            self._plain[inside] = copy
        return self._plain[inside]

    # Ids to text

    def decode(
        self, ids: Iterable[int], skip_special_tokens: bool = True, *, inside: bool = False
    ) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD.

        `inside` says that the ids go on from others, so that a first space is kept.
        """
        table = self.visible_table if skip_special_tokens else self.bytes_table
        size = len(table)
        data = b"".join([table[token] for token in ids if 0 <= token < size])
        if self.strips_space and not inside and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; none for an id that only the model's padded table has."""
        return self.bytes_table[token] if 0 <= token < len(self.bytes_table) else b""

    def token_text(self, token: int) -> str:
        """One token as text, U+FFFD where it is a part of a character."""
        return self.token_bytes(token).decode("utf-8", "replace")

    @property
    def vocab_size(self) -> int:
        """Size of the id table, added tokens included."""
        return len(self.bytes_table)

    def is_special(self, token: int) -> bool:
        """True for tokens that are control and not text."""
        return token in self.special_ids


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has half a surrogate pair at character {error.start}; send whole "
            "characters, as UTF-8 or as a pair of escapes."
        ) from None


def _parts(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder, in order."""
    if decoder is None:
        return []
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return list(steps)


def _kind(decoder: dict[str, Any] | None, name: str) -> _Kind:
    types = [part["type"] for part in _parts(decoder)]
    if "ByteLevel" in types:
        return "bytes"
    if "Metaspace" in types or "Replace" in types:
        return "sentencepiece"
    if not types:
        return "words"
    raise CheckpointError(
        f"{name}: the decoder {' + '.join(types)} is not supported; byte-level BPE and "
        "SentencePiece vocabularies are."
    )


def _strips_space(decoder: dict[str, Any] | None) -> bool:
    """True if the decoder takes one space from the front of a text."""
    for part in _parts(decoder):
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return True
        if part["type"] == "Strip" and part["content"] == " " and part["start"] > 0:
            return True
    return False


def _never_prepend(pre_tokenizer: dict[str, Any]) -> None:
    """Turn off the space that a Metaspace step puts before the first word only."""
    for step in (pre_tokenizer, *pre_tokenizer.get("pretokenizers", ())):
        if step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"


def byte_letters() -> dict[str, int]:
    """The letters by which byte-level vocabularies write the 256 bytes (as GPT-2 does).

    Bytes that print as they are stand for themselves, the others are moved to 256 and up.
    """
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printing}
    moved = (byte for byte in range(256) if chr(byte) not in letters)
    return letters | {chr(256 + place): byte for place, byte in enumerate(moved)}


def _bytes_table(
    backend: tokenizers.Tokenizer, added: dict[int, tokenizers.AddedToken], kind: _Kind
) -> list[bytes]:
    vocabulary = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    letters = byte_letters()
    for word, token in vocabulary.items():
        if token in added:
            table[token] = _added_bytes(added[token], kind)
        elif kind == "bytes":
            table[token] = _letters_to_bytes(word, letters)
        elif kind == "words":
            table[token] = b" " + word.encode()
        elif match := _BYTE_TOKEN.fullmatch(word):
            table[token] = bytes([int(match.group(1), 16)])
        else:
            table[token] = word.replace(_SPACE_MARK, " ").encode()
    return table


def _letters_to_bytes(word: str, letters: dict[str, int]) -> bytes:
    try:
        return bytes([letters[letter] for letter in word])
    except KeyError:  # not written in byte letters: the text itself
        return word.encode()


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _added_bytes(info: tokenizers.AddedToken, kind: _Kind) -> bytes:
    """Added tokens stand as they are, but for spaces in a SentencePiece vocabulary."""
    if kind == "words":
        return b" " + info.content.encode()
    if kind == "sentencepiece" and not info.special:
        return info.content.replace(_SPACE_MARK, " ").encode()
    return info.content.encode()
