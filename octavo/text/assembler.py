"""`Assembler`: the engine's news of one choice to text news for its caller.

Detokenizer, stop texts and log-probs come together here; pure and synchronous. Not for: queues
and events, nor the server's JSON. Next file: `text/chat.py`.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from octavo.obs.stats import RequestTimes
from octavo.sampling_params import SamplingParams
from octavo.text.detokenizer import Detokenizer
from octavo.text.stops import StopMatcher
from octavo.text.tokenizer import Tokenizer
from octavo.types import FinishReason, SequenceOutput, TokenLogprobs

LOGPROB_FLOOR = -9999.0  # stands for minus infinity, which JSON does not know


@dataclass(slots=True)
class TokenLogprob:
    """Log-probs at one position."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    text: str  # U+FFFD where the token is part of a character
    raw: bytes
    # The best alternatives in falling order, then those asked for by id.
    top: list[tuple[int, float, str, bytes]]


@dataclass(slots=True)
class Delta:
    """What is new of one choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None  # one a token id
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # stop text or id of the caller; None for an end token
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached: int = 0
    error: str = ""
    pooled: bytes = b""  # f32[H], if hidden states are pooled
    times: RequestTimes | None = None  # of the choice so far, from whoever keeps them


class Assembler:
    """One per choice. Once `finished` by a stop text, the caller aborts the sequence."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        params: SamplingParams,
        *,
        index: int = 0,
        eos_ids: Collection[int] = (),
    ) -> None:
        """`tokenizer` may be None if `params.detokenize` is false."""
        self._tokenizer = tokenizer
        self._params = params
        self._index = index
        self._eos_ids = () if params.ignore_eos else eos_ids
        self._include = params.include_stop_str_in_output
        self._detokenizer: Detokenizer | None = None
        if params.detokenize:
            assert tokenizer is not None, "text needs a tokenizer"
            self._detokenizer = Detokenizer(
                tokenizer, skip_special_tokens=params.skip_special_tokens
            )
        stops = params.stops
        self._stops = StopMatcher(stops, self._include) if stops else None
        self.num_tokens = 0  # output tokens that count
        self.finished = False

    def push(self, output: SequenceOutput) -> Delta:
        """The news in text form; empty if already finished."""
        delta = Delta(self._index, num_cached=output.num_cached, error=output.error)
        if self.finished:
            return delta
        if output.prompt_logprobs is not None:
            delta.prompt_logprobs = [
                None if entry is None else self._logprob(entry) for entry in output.prompt_logprobs
            ]
        delta.text, kept = self._take(output)
        self._end(output, delta)
        delta.token_ids = output.new_ids[:kept]
        if output.pooled:
            delta.pooled = output.pooled
        if output.logprobs is not None:
            delta.logprobs = [self._logprob(entry) for entry in output.logprobs[:kept]]
        self.finished = delta.finish_reason is not None
        return delta

    def _take(self, output: SequenceOutput) -> tuple[str, int]:
        """The text of the new tokens, and how many of them count."""
        ids = output.new_ids
        before = self.num_tokens
        self.num_tokens = before + len(ids)
        if self._detokenizer is None:
            return "", len(ids)
        # The token that ends a sequence is no part of its text, unless asked for.
        shown = ids if output.stop_id is None or self._include else ids[:-1]
        if self._stops is None:
            return self._detokenizer.push(shown), len(ids)
        text = ""
        for place, token in enumerate(shown):
            can_stop = before + place + 1 > self._params.min_tokens
            text += self._stops.push(self._detokenizer.push((token,)), can_stop)
            if self._stops.matched is not None:
                self.num_tokens = before + place + 1
                return text, place + 1
        return text, len(ids)

    def _end(self, output: SequenceOutput, delta: Delta) -> None:
        """Reason, and what was held back, if this is the end."""
        stops = self._stops
        if output.reason is not None and self._detokenizer is not None:
            rest = self._detokenizer.flush()
            if stops is None:
                delta.text += rest
            else:
                delta.text += stops.push(rest, self.num_tokens > self._params.min_tokens)
                delta.text += stops.flush()
        if stops is not None and stops.matched is not None:
            delta.finish_reason, delta.stop_reason = "stop", stops.matched
            return
        delta.finish_reason = output.reason
        if output.stop_id is not None and output.stop_id not in self._eos_ids:
            delta.stop_reason = output.stop_id

    def _logprob(self, entry: TokenLogprobs) -> TokenLogprob:
        shown = _nothing if self._tokenizer is None else self._tokenizer.shown
        (token, value, text, raw), *tops = [
            (token, value if LOGPROB_FLOOR < value < math.inf else LOGPROB_FLOOR, *shown(token))
            for token, value in zip(entry.ids, entry.values, strict=True)
        ]
        return TokenLogprob(token, value, entry.rank, text, raw, tops)


def _nothing(_: int) -> tuple[str, bytes]:
    """Stands for a tokenizer where texts are not wanted."""
    return "", b""
