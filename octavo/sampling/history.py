"""What penalties and bad words must remember of one sequence: its tokens, counted as they come.

Kept as a short list of the distinct tokens seen, so that a step touches those logits alone and not
a row of the whole vocabulary. Not for: applying anything (`penalties.py`, `processors.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenHistory:
    """Distinct tokens of a sequence with their number in the output, in order of first sight."""

    __slots__ = ("_at", "_counts", "_ids", "output")

    def __init__(self, tokens: Sequence[int], num_prompt: int) -> None:
        """`tokens` are all that are known; those from `num_prompt` on are output."""
        distinct = list(dict.fromkeys(tokens[:num_prompt]))
        self._at = {token: index for index, token in enumerate(distinct)}
        room = max(16, 2 * len(distinct))
        self._ids = np.zeros(room, np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(room, np.float32)
        self.output: list[int] = []
        for token in tokens[num_prompt:]:
            self.append(token)

    def append(self, token: int) -> None:
        """Notes one more output token."""
        self.output.append(token)
        index = self._at.get(token)
        if index is None:
            index = len(self._at)
            if index == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._at[token] = index
            self._ids[index] = token
        self._counts[index] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """i64[n] distinct tokens of prompt and output."""
        return self._ids[: len(self._at)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """f32[n] how often each of `ids` stands in the output; 0 for tokens of the prompt alone."""
        return self._counts[: len(self._at)]
