"""`Grammars` and `Follower`: which tokens a grammar allows next, step by step. The worker's side.

Grammars are compiled in a few threads, before a sequence may be planned; each step's
tokens are taken in and its masks computed by one call for all rows, in native threads with the
interpreter free, so that it goes on beside the model's own work. Every grammar has been checked by
`check.py` before; one that becomes too complex all the same fails its own request alone.
Not for: applying a mask (`sampling/masks.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import llguidance
import numpy as np
from numpy.typing import NDArray

from octavo.config import Vocabulary
from octavo.errors import GRAMMAR_FAILED
from octavo.grammar.numbers import NumberGuard, digit_runs
from octavo.grammar.vocabulary import new_matcher, open_vocabulary, table_of
from octavo.types import Grammar

Words = NDArray[np.int32]  # [n, words of 32 tokens], a bit each, the lowest first

COMPILED = 64  # grammars that are kept


class Follower:
    """One sequence's place in its grammar. Tokens are noted here and taken in by the next masks."""

    __slots__ = ("_guard", "_new", "_start", "matcher")

    def __init__(
        self, start: Future[llguidance.LLMatcher], tokens: Sequence[int], grammar: Grammar
    ) -> None:
        """`tokens` are those of the answer so far."""
        self._start = start
        self._new = list(tokens)
        self._guard = NumberGuard() if grammar.json else None
        self.matcher: llguidance.LLMatcher | None = None

    def append(self, token: int) -> None:
        """A token has been chosen."""
        self._new.append(token)

    def catch_up(self, table: Sequence[bytes]) -> llguidance.LLMatcher:
        """The matcher after all tokens; waits for the grammar if it is still being compiled."""
        if self.matcher is None:
            self.matcher = self._start.result().deep_copy()
        if self._new:
            tokens, self._new = self._new, []
            self.matcher.consume_tokens(tokens)
            if self._guard is not None:
                for token in tokens:
                    self._guard.feed(table[token] if token < len(table) else b"")
        return self.matcher

    @property
    def digits_left(self) -> int | None:
        """How many more digits the number may have that is being written, None if any."""
        return None if self._guard is None else self._guard.left


class Grammars:
    """All that a worker needs for grammars."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, threads: int) -> None:
        """For logits of `vocab_size` columns; masks are made in so many threads."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._words = -(-vocab_size // 32)
        self._pool = ThreadPoolExecutor(max(2, min(4, threads)), "grammar")
        self._steps = ThreadPoolExecutor(1, "masks")
        self._native = llguidance.LLExecutor(max(1, threads))
        self._compiled: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._table: list[bytes] = []
        self._runs: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._longest_run = 0  # digits that a token begins with at most
        self._zeros: NDArray[np.bool_] = np.zeros(0, np.bool_)  # tokens that begin with one
        # Some tenths of a second that no request waits for.
        self._opened = self._pool.submit(self._open)

    def follow(self, grammar: Grammar, tokens: Sequence[int]) -> Follower:
        """A follower after `tokens` of an answer; compiling goes on meanwhile."""
        return Follower(self._start(grammar.text), tokens, grammar)

    def prepare(self, text: str, seconds: float) -> bool:
        """Begins to compile a grammar's text; true if that has ended, after at most `seconds`."""
        wait([self._start(text)], seconds)
        return self._start(text).done()

    def _start(self, text: str) -> Future[llguidance.LLMatcher]:
        """Compiles, unless that has been begun; the last ones are kept."""
        start = self._compiled.get(text)
        if start is None:
            start = self._pool.submit(self._compile, text)
            self._compiled[text] = start
            if len(self._compiled) > COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(text)
        return start

    def begin(self, followers: Sequence[Follower]) -> Future[tuple[Words, dict[int, str]]]:
        """Masks of the next token of each, and why there is none by index; computed meanwhile.

        The followers must not be touched before the result is there.
        """
        return self._steps.submit(self.masks, followers)

    def masks(self, followers: Sequence[Follower]) -> tuple[Words, dict[int, str]]:
        """As `begin`, waiting for it."""
        self._opened.result()  # after it there is a table
        matchers = [follower.catch_up(self._table) for follower in followers]
        words: Words = np.zeros((len(matchers), self._words), np.int32)
        self._native.unsafe_compute_mask_ptr(
            list(zip(matchers, range(len(matchers)), strict=True)),
            words.ctypes.data,
            self._words * 4,
            len(matchers),
        )
        failed: dict[int, str] = {}
        for index, (follower, matcher) in enumerate(zip(followers, matchers, strict=True)):
            if matcher.is_error():
                failed[index] = GRAMMAR_FAILED
            elif (left := follower.digits_left) is not None and left < self._longest_run:
                self._bound(words[index], left)
        return words, failed

    def close(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._steps.shutdown(wait=False, cancel_futures=True)

    def _compile(self, text: str) -> llguidance.LLMatcher:
        return new_matcher(self._opened.result(), text)

    def _open(self) -> llguidance.LLTokenizer:
        self._table = table_of(self._vocabulary)
        self._runs = digit_runs(self._table, 32 * self._words)
        self._longest_run = int(self._runs.max(initial=0))
        self._zeros = np.zeros(32 * self._words, np.bool_)
        firsts = [word[:1] == b"0" for word in self._table[: 32 * self._words]]
        self._zeros[: len(firsts)] = firsts
        return open_vocabulary(self._vocabulary, self._vocab_size)

    def _bound(self, words: Words, left: int) -> None:
        """Takes out the tokens that begin with more than `left` digits, if others remain.

        Where a schema's limits want more digits, as after -0.000 for a number below zero, zeros
        are taken out, which lead nowhere.
        """
        bits = np.unpackbits(words.view(np.uint8), bitorder="little").astype(np.bool_)
        for good in (self._runs <= left, ~self._zeros):
            kept = bits & good
            if kept.any():
                words[:] = np.packbits(kept, bitorder="little").view(np.int32)
                return
