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
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import tokenizers

from octavo.errors import CheckpointError, InvalidRequest

if TYPE_CHECKING:
    from octavo.checkpoint.records import Checkpoint

# Texts of this many characters and more are encoded as a batch of one: it does not note where each
# token lay, a fifth of the time, and frees the interpreter, but is given to another thread.
BATCH_FROM = 1024
# Texts of this many characters and more are encoded in a thread, with the interpreter free.
THREAD_FROM = 8192
# And texts of this many in another process, where there is one: see `pool.py`.
PROCESS_FROM = 2**20
_PART = 2**16  # ids that are made a list at a time, about a millisecond

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
        self._more_special = any(
            token in self.special_ids and not info.special for token, info in added.items()
        )
        self._prepends_once = any(
            step["type"] == "Metaspace" and step.get("prepend_scheme") == "first"
            for step in _steps(_record(backend.pre_tokenizer))
        )
        decoder = _steps(_record(backend.decoder))
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
        self._specials = {
            info.content: (token, info)
            for token, info in added.items()
            if token in self.special_ids
        }
        # Longest first, as the library matches them.
        words = sorted(self._specials, key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, words))) if words else None
        self._plain: dict[bool, tokenizers.Tokenizer] = {}
        self._shown: dict[int, tuple[str, bytes]] = {}
        self._elsewhere: Callable[[str], Awaitable[array[int]]] | None = None
        eats = any(info.lstrip or info.rstrip for _, info in self._specials.values())
        self._reach = 0 if eats else _reach(backend, self.bytes_table, kind)

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
        ids = _run(self.backend, text)
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
        ids = await self.encode_packed(text, add_special_tokens)
        return ids if isinstance(ids, list) else await asyncio.to_thread(_as_list, ids)

    async def encode_packed(
        self, text: str, add_special_tokens: bool = True
    ) -> list[int] | array[int]:
        """As `encode_async`, but millions of ids stay packed: a list of them is slow to free."""
        if len(text) < THREAD_FROM:
            return self.encode(text, add_special_tokens)
        if self._elsewhere is None or len(text) < PROCESS_FROM:
            return await asyncio.to_thread(self.encode, text, add_special_tokens)
        await asyncio.to_thread(_check_text, text)
        packed = await self._elsewhere(text)
        if add_special_tokens and self.add_bos and packed[:1].tolist() != [self.bos_id]:
            packed.insert(0, self.bos_id or 0)
        return packed

    def send_long_texts(self, encode: Callable[[str], Awaitable[array[int]]]) -> None:
        """From now on `encode_async` has the longest texts encoded by `encode`, as packed ids."""
        self._elsewhere = encode

    def encode_plain(self, text: str, *, inside: bool = False) -> list[int]:
        """Token ids of a text in which nothing is special: `<|end|>` stays these seven letters.

        `inside` says that other tokens come before, so that no first-word space is added.
        """
        _check_text(text)
        return _run(self._plain_backend(inside), text)

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

        For refusing what cannot fit; 0 where nothing can be said.
        """
        return len(text) // self._reach if self._reach else 0

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
        inside = inside and self._prepends_once
        if inside not in self._plain:
            text = self.backend.to_str()
            if inside or self._more_special:
                record = json.loads(text)
                for entry in record["added_tokens"]:
                    entry["special"] = entry["id"] in self.special_ids
                for step in _steps(record["pre_tokenizer"]) if inside else ():
                    if step["type"] == "Metaspace":
                        step["prepend_scheme"] = "never"
                text = json.dumps(record)
            copy = tokenizers.Tokenizer.from_str(text)
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

    def shown(self, token: int) -> tuple[str, bytes]:
        """Text and bytes of one token as `token_text` and `token_bytes`, remembered."""
        found = self._shown.get(token)
        if found is None:
            found = self._shown[token] = (self.token_text(token), self.token_bytes(token))
        return found

    @property
    def vocab_size(self) -> int:
        """Size of the id table, added tokens included."""
        return len(self.bytes_table)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"The text has half a surrogate pair at character {error.start}; send whole "
            "characters, as UTF-8 or as a pair of escapes."
        ) from None


def _as_list(packed: array[int]) -> list[int]:
    """In parts, between which other threads have their turn."""
    ids: list[int] = []
    for start in range(0, len(packed), _PART):
        ids += packed[start : start + _PART]
    return ids


def _run(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    if len(text) < BATCH_FROM:
        ids: list[int] = backend.encode(text, add_special_tokens=False).ids
    else:
        ids = backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
    return ids


def _record(component: Any) -> dict[str, Any] | None:
    """A part of a backend in its file form."""
    return None if component is None else json.loads(component.__getstate__())


def _steps(record: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps of a decoder, normalizer or pre-tokenizer, in order."""
    if record is None:
        return []
    if record["type"] != "Sequence":
        return [record]
    inner = next(value for key, value in record.items() if key != "type")
    return [step for part in inner for step in _steps(part)]


def _kind(decoder: list[dict[str, Any]], name: str) -> _Kind:
    types = [step["type"] for step in decoder]
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


def _strips_space(decoder: list[dict[str, Any]]) -> bool:
    """True if the decoder takes one space from the front of a text."""
    for step in decoder:
        if step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never":
            return True
        if step["type"] == "Strip" and step["content"] == " " and step["start"] > 0:
            return True
    return False


def _reach(backend: tokenizers.Tokenizer, table: list[bytes], kind: _Kind) -> int:
    """How many characters a token stands for at most; 0 if that is not known.

    It is not where unknown characters melt into one token or where some are dropped. Normalizers
    make a text shorter by a factor of 4 at most, as far as they are known.
    """
    steps = _steps(_record(backend.normalizer)), _steps(_record(backend.pre_tokenizer))
    types = {step["type"] for step in steps[0]}
    squeezes = any(
        step["type"] == "Replace" and len(step["pattern"].get("String", "any")) > 1
        for step in steps[0]
    )
    drops = any(
        step["type"].startswith("Whitespace") or step.get("behavior") == "Removed"
        for step in steps[1]
    )
    falls_back = kind == "bytes" or {bytes([byte]) for byte in range(128, 256)} <= set(table)
    if drops or squeezes or not falls_back or not types <= {"NFC", "NFKC", "Prepend", "Replace"}:
        return 0
    return max(map(len, table), default=0) * (4 if types else 1)


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
