"""A request on its way through the engine: its settings, its news, and their fold.

`Following` is the one source of both forms of answer: a stream writes news out as they come, a
plain answer is their fold. An ending that is no answer (deadline, failure, shutdown) becomes an
exception here, so that it can never look like a short answer. Not for: JSON.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from octavo.errors import (
    GRAMMAR_FAILED,
    NO_TOKEN,
    DeadlineExceeded,
    Draining,
    InvalidRequest,
    RequestFailed,
)
from octavo.obs.timeline import Timeline
from octavo.prompts import check_length
from octavo.sampling_params import SamplingParams
from octavo.server.engine import Answer, Engine
from octavo.server.forms import demanded_form
from octavo.server.prompts import Prompt
from octavo.server.schema import Generation
from octavo.server.settings import ServerSettings
from octavo.text.assembler import Delta, TokenLogprob

# Fields of a request that go into SamplingParams under their own name.
_PASSED = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "logprob_token_ids",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
)
LATE = "The request's deadline passed before it was answered."
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Job:
    """What the engine is asked: prompts with the same settings."""

    id: str
    prompts: list[Prompt]
    params: SamplingParams
    arrival: float
    priority: int = 0
    deadline: float = 0.0
    cache_salt: str = ""
    tenant: str = ""
    weight: float = 1.0  # of the tenant's share
    timeline: Timeline | None = None
    silent: bool = False  # max_tokens was 0: the one token that is generated is not shown

    @property
    def num_choices(self) -> int:
        """Choices of all prompts together."""
        return len(self.prompts) * self.params.n

    def prompt_of(self, index: int) -> Prompt:
        """The prompt that choice `index` continues."""
        return self.prompts[index // self.params.n]


@dataclass(slots=True)
class Choice:
    """One choice, as far as it has come."""

    texts: list[str] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)  # tokens that came with each text
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    pooled: bytes = b""

    def add(self, delta: Delta) -> None:
        """Take what is new."""
        self.texts.append(delta.text)
        self.sizes.append(len(delta.token_ids))
        self.token_ids += delta.token_ids
        self.pooled = self.pooled or delta.pooled
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
            self.stop_reason = delta.stop_reason


@dataclass(slots=True)
class Usage:
    """Counts of one request, in tokens. `prompt_tokens` counts each prompt once."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int | None = None  # None where thought is not told from the answer

    def body(self) -> dict[str, object]:
        """As the API shows it."""
        shown: dict[str, object] = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }
        if self.reasoning_tokens is not None:
            shown["completion_tokens_details"] = {"reasoning_tokens": self.reasoning_tokens}
        return shown


class Counter:
    """Keeps `Usage` up to date while deltas come."""

    def __init__(self, job: Job) -> None:
        self.usage = Usage(sum(len(prompt.ids) for prompt in job.prompts))
        self._choices = job.params.n
        self._cached = [0] * len(job.prompts)

    def count(self, index: int, delta: Delta) -> None:
        """Count one delta. The first choice of a prompt says how much of it was cached."""
        usage = self.usage
        usage.completion_tokens += len(delta.token_ids)
        if delta.num_cached and index % self._choices == 0:
            prompt = index // self._choices
            usage.cached_tokens += max(0, delta.num_cached - self._cached[prompt])
            self._cached[prompt] = max(self._cached[prompt], delta.num_cached)


def sampling_params(
    request: Generation,
    *,
    settings: ServerSettings,
    engine: Engine,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The request's settings, over the model's defaults, checked. Raises InvalidRequest."""
    vocab_size = engine.limits.vocab_size
    stops = request.stop if isinstance(request.stop, list) else ()
    if len(stops) > settings.max_stop_strings:
        raise InvalidRequest(
            f"stop has {len(stops)} texts; send at most {settings.max_stop_strings}.", "stop"
        )
    allowed = request.allowed_token_ids or ()
    if len(allowed) > vocab_size:  # before anybody looks at each of them
        raise InvalidRequest(
            f"allowed_token_ids has {len(allowed)} ids; this model has {vocab_size}.",
            "allowed_token_ids",
        )
    given = msgspec.structs.asdict(request)
    values = {name: given[name] for name in _PASSED if given[name] is not None}
    for name in _DEFAULTED:
        if name in engine.generation_defaults:
            values.setdefault(name, engine.generation_defaults[name])
    params = SamplingParams(
        max_tokens=max_tokens,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_outputs=demanded_form(request),
        **values,
    )
    params.check_model(vocab_size=vocab_size, max_logprobs=engine.limits.max_logprobs)
    return params


def check_lengths(prompts: list[Prompt], longest: int, max_tokens: int | None, name: str) -> None:
    """Raises InvalidRequest, naming the field, for a prompt that does not fit the context."""
    for prompt in prompts:
        try:
            check_length(len(prompt.ids), longest, max_tokens)
        except InvalidRequest as error:
            raise InvalidRequest(
                error.message, name if error.param == "prompt" else error.param
            ) from None


class Receiver(Protocol):
    """Who hears what a job gives. Called in the event loop, in order."""

    def news(self, index: int, delta: Delta) -> None:
        """What is new of choice `index`, counted over all prompts."""
        ...

    def end(self, error: Exception | None) -> None:
        """Nothing more comes, because all choices have ended or because of `error`."""
        ...


class Following:
    """A job in the engine; passes its news on until it ends, once, or is closed."""

    def __init__(self, engine: Engine, job: Job, receiver: Receiver) -> None:
        """Submits all prompts. Raises what the engine raises, Overloaded for a full queue."""
        self._silent = job.silent
        self._deadline = job.deadline
        self._receiver = receiver
        self._left = job.num_choices
        self._open = True
        self._answers: list[Answer] = []
        num_prompt = sum(len(prompt.ids) for prompt in job.prompts)
        engine.admit(job.num_choices, num_prompt, job.tenant)
        try:
            for number in range(len(job.prompts)):
                part = _Part(self, number * job.params.n)
                self._answers.append(_submit(engine, job, number, part))
        except BaseException:
            self.close()
            raise

    def news(self, index: int, delta: Delta) -> None:
        """A delta of one of the prompts."""
        if not self._open:
            return
        ended = delta.finish_reason is not None
        if ended and self._deadline and time.monotonic() > self._deadline:
            self.end(DeadlineExceeded(LATE))  # it came within a step that began in time
            return
        if ended and delta.finish_reason in ("timeout", "error", "abort"):
            self.end(_failure(delta))
            return
        if self._silent:
            _silence(delta)
        self._receiver.news(index, delta)
        if ended:
            self._left -= 1
            if not self._left:
                self.end(None)

    def end(self, error: Exception | None) -> None:
        """Ends all prompts; what still runs is aborted."""
        if self._open:
            self.close()
            self._receiver.end(error)

    def close(self) -> None:
        """As `end`, without a word to the receiver."""
        self._open = False
        for answer in self._answers:
            answer.close()


class _Part:
    """Hears the choices of one prompt."""

    __slots__ = ("_first", "_following")

    def __init__(self, following: Following, first: int) -> None:
        self._following = following
        self._first = first

    def news(self, delta: Delta) -> None:
        self._following.news(self._first + delta.index, delta)

    def broken(self, error: Exception) -> None:
        self._following.end(error)


def _submit(engine: Engine, job: Job, number: int, listener: _Part) -> Answer:
    return engine.open(
        job.prompts[number].ids,
        job.params,
        listener,
        request_id=job.id if number == 0 else f"{job.id}-{number}",
        arrival=job.arrival,
        priority=job.priority,
        deadline=job.deadline,
        cache_salt=job.cache_salt,
        tenant=job.tenant,
        weight=job.weight,
        timeline=job.timeline,
    )


def _silence(delta: Delta) -> None:
    delta.text, delta.token_ids, delta.logprobs = "", [], None
    if delta.finish_reason is not None:
        delta.finish_reason, delta.stop_reason = "length", None


def _failure(delta: Delta) -> Exception:
    if delta.finish_reason == "timeout":
        return DeadlineExceeded(LATE)
    if delta.finish_reason == "abort":
        return Draining("The answer was cut off because the server is shutting down.")
    if delta.error in (NO_TOKEN, GRAMMAR_FAILED):
        return InvalidRequest(f"The request cannot be answered: {delta.error}.")
    return RequestFailed(f"The engine could not finish this request: {delta.error or 'unknown'}.")


class Fold:
    """The whole answer of a job, put together while it comes."""

    def __init__(self, job: Job) -> None:
        self._choices = [Choice() for _ in range(job.num_choices)]
        self._counter = Counter(job)
        self._done = asyncio.get_running_loop().create_future()

    def news(self, index: int, delta: Delta) -> None:
        """Takes one delta."""
        self._choices[index].add(delta)
        self._counter.count(index, delta)

    def end(self, error: Exception | None) -> None:
        """No more comes."""
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)

    async def result(self) -> tuple[list[Choice], Usage]:
        """Waits for the end; raises what there was instead of an answer."""
        await self._done
        return self._choices, self._counter.usage


async def fold(engine: Engine, job: Job) -> tuple[list[Choice], Usage]:
    """The whole answer; what runs is aborted if the caller stops waiting."""
    whole = Fold(job)
    following = Following(engine, job, whole)
    try:
        return await whole.result()
    finally:
        following.close()
