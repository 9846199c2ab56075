"""Turns the text deltas of one request into `RequestOutput`s, as the Python interface gives them.

Used by `LLM` and `AsyncLLMEngine`. Not for: HTTP bodies, which `server/` makes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from octavo.obs.stats import RequestTimes
from octavo.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.text.assembler import Delta, TokenLogprob


class OutputCollector:
    """Gathers one request's choices."""

    def __init__(
        self, request_id: str, prompt: str | None, prompt_ids: list[int], params: SamplingParams
    ) -> None:
        self._request_id = request_id
        self._prompt = prompt
        self._prompt_ids = prompt_ids
        self._kind = params.output_kind
        self._num_ranked = params.logprobs or 0
        self._num_prompt_ranked = params.prompt_logprobs or 0
        self._choices = [_empty(index, params) for index in range(params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached = 0
        self._times: dict[int, RequestTimes] = {}  # by choice

    @property
    def finished(self) -> bool:
        """True once every choice has ended."""
        return all(choice.finish_reason is not None for choice in self._choices)

    def add(self, delta: Delta) -> RequestOutput | None:
        """Takes one delta; the output to hand on, or None where the caller wants only the last."""
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.token_ids.extend(delta.token_ids)
        new_logprobs = (
            None
            if delta.logprobs is None
            else [_position(p, self._num_ranked) for p in delta.logprobs]
        )
        if new_logprobs is not None and choice.logprobs is not None and delta.logprobs is not None:
            choice.logprobs.extend(new_logprobs)
            gained = sum(p.logprob for p in delta.logprobs)
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + gained
        if delta.pooled:
            choice.pooled = delta.pooled
        if delta.finish_reason is not None:
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs = [
                None if p is None else _position(p, self._num_prompt_ranked)
                for p in delta.prompt_logprobs
            ]
        self._num_cached = max(self._num_cached, delta.num_cached)
        if delta.times is not None:
            self._times[delta.index] = delta.times
        if self._kind == RequestOutputKind.FINAL_ONLY:
            return self._output(self._choices) if self.finished else None
        if self._kind == RequestOutputKind.DELTA:
            return self._output([_news(choice, delta, new_logprobs)])
        return self._output(self._choices)

    def _output(self, choices: list[CompletionOutput]) -> RequestOutput:
        return RequestOutput(
            request_id=self._request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[_copy(choice) for choice in choices],
            finished=self.finished,
            metrics=request_metrics(list(self._times.values())),
            num_cached_tokens=self._num_cached,
        )


def request_metrics(times: list[RequestTimes]) -> RequestMetrics | None:
    """What the times of a request's choices say of it: first beginnings, last ends, all tokens."""
    if not times:
        return None
    arrival = min(one.arrival for one in times)
    first = _earliest(one.first_token for one in times)
    return RequestMetrics(
        arrival_time=time.time() - (time.monotonic() - arrival),
        queued_ts=arrival,
        scheduled_ts=_earliest(one.scheduled for one in times),
        first_token_ts=first,
        last_token_ts=max(one.last_token for one in times),
        first_token_latency=max(0.0, first - arrival) if first else 0.0,
        num_generation_tokens=sum(one.generation_tokens for one in times),
    )


def _earliest(moments: Iterable[float]) -> float:
    return min((moment for moment in moments if moment), default=0.0)


def _empty(index: int, params: SamplingParams) -> CompletionOutput:
    wanted = params.logprobs is not None
    return CompletionOutput(
        index=index,
        text="",
        token_ids=[],
        cumulative_logprob=0.0 if wanted else None,
        logprobs=[] if wanted else None,
    )


def _copy(choice: CompletionOutput) -> CompletionOutput:
    """A caller may keep an output while later deltas arrive."""
    return CompletionOutput(
        index=choice.index,
        text=choice.text,
        token_ids=list(choice.token_ids),
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=None if choice.logprobs is None else list(choice.logprobs),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        pooled=choice.pooled,
    )


def _news(
    choice: CompletionOutput, delta: Delta, logprobs: list[dict[int, Logprob]] | None
) -> CompletionOutput:
    return CompletionOutput(
        index=choice.index,
        text=delta.text,
        token_ids=delta.token_ids,
        cumulative_logprob=choice.cumulative_logprob,
        logprobs=logprobs,
        finish_reason=delta.finish_reason,
        stop_reason=delta.stop_reason,
        pooled=delta.pooled,
    )


def _position(token: TokenLogprob, num_ranked: int) -> dict[int, Logprob]:
    """The token itself first, then the best ones with their ranks, then those asked for by id.

    `num_ranked` of -1 is the whole vocabulary. The rank of a token asked for by id is not known.
    """
    entries = {token.token_id: Logprob(token.logprob, token.rank, token.text)}
    for rank, (token_id, value, text, _) in enumerate(token.top, start=1):
        known = rank if num_ranked == -1 or rank <= num_ranked else None
        entries.setdefault(token_id, Logprob(value, known, text))
    return entries
