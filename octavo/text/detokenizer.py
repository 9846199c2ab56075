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

    __slots__ = ("_pending", "_strip", "_table")

    def __init__(
        self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, inside: bool = True
    ) -> None:
        visible = tokenizer.visible_table if skip_special_tokens else tokenizer.bytes_table
        self._table = visible
        self._pending = b""  # the beginning of a character
        self._strip = tokenizer.strips_space and not inside

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; may be empty."""
        table = self._table
        try:
            data = b"".join([table[token] for token in ids])
        except IndexError:  # the model's table may be padded beyond the tokenizer's
            data = b"".join([table[token] for token in ids if token < len(table)])
        if self._strip and data:
            self._strip = False
            data = data.removeprefix(b" ")
        if self._pending:
            data = self._pending + data
        text, used = utf_8_decode(data, "replace", False)
        self._pending = data[used:]
        return text

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was never completed."""
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return text
