"""A request on its way through the engine: its settings, its deltas, and their fold.

`deltas` is the one source of both forms of answer: a stream writes them out as they come, a plain
answer is their fold. An ending that is no answer (deadline, failure, shutdown) becomes an
exception here, so that it can never look like a short answer. Not for: JSON.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from octavo.errors import DeadlineExceeded, Draining, InvalidRequest, RequestFailed
from octavo.prompts import check_length
from octavo.sampling_params import SamplingParams
from octavo.server.engine import Engine
from octavo.server.prompts import Prompt
from octavo.server.schema import Generation
from octavo.server.settings import ServerSettings
from octavo.text.assembler import Delta, TokenLogprob

QUEUE_SIZE = 64  # deltas of several prompts that wait to be written

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
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        """Take what is new."""
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
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

    def body(self) -> dict[str, object]:
        """As the API shows it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


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
        max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **values
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


async def deltas(engine: Engine, job: Job) -> AsyncGenerator[tuple[int, Delta], None]:
    """(choice index, delta) of all choices; closing it aborts what still runs.

    Raises what the engine raises, and DeadlineExceeded, RequestFailed or Draining for a choice
    that ended without an answer.
    """
    engine.admit(job.num_choices, sum(len(prompt.ids) for prompt in job.prompts))
    streams = [_submit(engine, job, number) for number in range(len(job.prompts))]
    if len(streams) == 1:
        source = _only(streams[0])
    else:
        source = _merged(streams, job.params.n)
    async with aclosing(source):
        async for index, delta in source:
            if delta.finish_reason in ("timeout", "error", "abort"):
                raise _failure(delta)
            if job.silent:
                _silence(delta)
            yield index, delta


def _submit(engine: Engine, job: Job, number: int) -> AsyncIterator[Delta]:
    return engine.generate(
        job.prompts[number].ids,
        job.params,
        request_id=job.id if number == 0 else f"{job.id}-{number}",
        arrival=job.arrival,
        priority=job.priority,
        deadline=job.deadline,
        cache_salt=job.cache_salt,
    )


async def _only(stream: AsyncIterator[Delta]) -> AsyncGenerator[tuple[int, Delta], None]:
    try:
        async for delta in stream:
            yield delta.index, delta
    finally:
        await _close(stream)


async def _close(stream: AsyncIterator[Delta]) -> None:
    """Ends a stream, which aborts what it still generates."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()


async def _merged(
    streams: list[AsyncIterator[Delta]], choices: int
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several prompts in the order in which they come."""
    queue: asyncio.Queue[tuple[int, Delta] | Exception | None] = asyncio.Queue(QUEUE_SIZE)

    async def pump(first: int, stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                await queue.put((first + delta.index, delta))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)
        finally:
            await _close(stream)

    tasks = [
        asyncio.ensure_future(pump(number * choices, stream))
        for number, stream in enumerate(streams)
    ]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if item is None:
                left -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _silence(delta: Delta) -> None:
    delta.text, delta.token_ids, delta.logprobs = "", [], None
    if delta.finish_reason is not None:
        delta.finish_reason, delta.stop_reason = "length", None


def _failure(delta: Delta) -> Exception:
    if delta.finish_reason == "timeout":
        return DeadlineExceeded("The request's deadline passed before it was answered.")
    if delta.finish_reason == "abort":
        return Draining("The answer was cut off because the server is shutting down.")
    return RequestFailed(f"The engine could not finish this request: {delta.error or 'unknown'}.")


async def fold(
    source: AsyncGenerator[tuple[int, Delta], None], job: Job
) -> tuple[list[Choice], Usage]:
    """The whole answer."""
    choices = [Choice() for _ in range(job.num_choices)]
    counter = Counter(job)
    async with aclosing(source):
        async for index, delta in source:
            choices[index].add(delta)
            counter.count(index, delta)
    return choices, counter.usage
