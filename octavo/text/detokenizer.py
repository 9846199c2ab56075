"""`Detokenizer`: token ids of a stream to text, never half a character, nothing lost.

The pieces joined are the decoding of all ids together. U+FFFD appears only where the bytes are
not UTF-8, as soon as that is certain. Not for: stop texts (`stops.py`).
Next file: `text/stops.py`.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Sequence

from octavo.text.tokenizer import Tokenizer


class Detokenizer:
    """One per stream. `inside` says that the ids go on from others, so a first space is kept."""

    __slots__ = ("_bytes", "_careful", "_pending", "_strip", "_texts")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, inside: bool = True
    ) -> None:
        if skip_special_tokens:
            self._bytes, self._texts = tokenizer.visible_table, tokenizer.visible_texts
        else:
            self._bytes, self._texts = tokenizer.bytes_table, tokenizer.texts
        self._pending = b""  # the beginning of a character
        self._strip = tokenizer.strips_space and not inside
        self._careful = self._strip  # True while the table of texts is not enough

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        if len(ids) == 1 and not self._careful:
            token = ids[0]
            text = self._texts[token] if token < len(self._texts) else ""
            if text is not None:  # whole characters after whole characters, the usual case
                return text
        table = self._bytes
        # The model's table may be padded beyond the tokenizer's.
        data = b"".join([table[token] for token in ids if token < len(table)])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        self._careful = self._strip or used < len(data)
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        self._careful = self._strip
        return text
