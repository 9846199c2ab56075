"""What a grammar must know of a model's tokens (`Vocabulary`), and the library's form of it.

The bytes are those by which answers are detokenized, so what the grammar allows and what the client
reads are the same text. It is sent to the processes that compile grammars; none of them loads a
tokenizer. Not for: encoding text. Next file: `schema.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import llguidance
import numpy as np

from octavo.config import Vocabulary

# No state of the parser in messages: they go to the client.
LIMITS = llguidance.LLParserLimits(verbose_errors=False)


class Words(Protocol):
    """What is asked of a tokenizer."""

    @property
    def bytes_table(self) -> Sequence[bytes]: ...
    @property
    def special_ids(self) -> Collection[int]: ...
    @property
    def eos_ids(self) -> Sequence[int]: ...


def vocabulary_of(tokenizer: Words) -> Vocabulary:
    """The bytes of each token; special tokens have their text."""
    table = tokenizer.bytes_table
    lengths = np.fromiter(map(len, table), np.int32, len(table))
    special = tuple(sorted(tokenizer.special_ids))
    return Vocabulary(b"".join(table), lengths.tobytes(), special, tuple(tokenizer.eos_ids))


def table_of(vocabulary: Vocabulary) -> list[bytes]:
    """The bytes of each token."""
    lengths = np.frombuffer(vocabulary.lengths, np.int32)
    ends = np.cumsum(lengths)
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    return [vocabulary.data[start:end] for start, end in pairs]


def special_texts(vocabulary: Vocabulary) -> dict[str, int]:
    """Ids of the special tokens by their texts."""
    table = table_of(vocabulary)
    texts = ((table[token], token) for token in vocabulary.special_ids if token < len(table))
    return {data.decode("utf-8", "replace"): token for data, token in texts if data}


class _Words:
    """The vocabulary as the library asks for it.

    It asks for tokens of bytes that the grammar forces: the longest that fits, again and again.
    """

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, size: int) -> None:
        table = table_of(vocabulary)[:size]
        special = set(vocabulary.special_ids)
        self.eos_token_id = vocabulary.eos_ids[0]
        self.special_token_ids = [token for token in vocabulary.special_ids if token < size]
        # The library knows special tokens by a first byte that no text has.
        self.tokens = [b"\xff" + w if i in special else w for i, w in enumerate(table)]
        self.tokens += [b""] * (size - len(table))
        self._ids = {w: i for i, w in reversed(list(enumerate(table))) if w and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, data: bytes) -> list[int]:
        ids, at = [], 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token = self._ids.get(data[at : at + length])
                if token is not None:
                    ids.append(token)
                    break
            at += length
        return ids


def open_vocabulary(vocabulary: Vocabulary, size: int | None = None) -> llguidance.LLTokenizer:
    """The library's form, for a model with `size` logits; takes some tenths of a second.

    Ids that the model has and the tokenizer has not are never allowed.
    """
    size = len(vocabulary.lengths) // 4 if size is None else size
    words = llguidance.TokenizerWrapper(_Words(vocabulary, size))
    return llguidance.LLTokenizer(words, eos_token=list(vocabulary.eos_ids))


def new_matcher(tokenizer: llguidance.LLTokenizer, text: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of an answer; `is_error` tells if the text is no grammar."""
    return llguidance.LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
