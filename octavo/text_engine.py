"""TextEngine: requests in, text deltas out. The tokenizer's side of the engine.

The server and `AsyncLLMEngine` are built on it. It expands `n`, makes text of tokens, ends what a
stop string ends, and keeps the counts that metrics show; `admission.py` says who is let in.
Not for: HTTP (`server/`), starting processes (`supervisor.py`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from octavo.admission import Admission, Door
from octavo.engine.client import Listener, Pulse
from octavo.errors import Draining, EngineDead, ServerError
from octavo.expand import Scheduling, expand, request_seeds
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.request import Form
from octavo.grammar.vocabulary import vocabulary_of
from octavo.obs.life import Life
from octavo.obs.metrics import Metrics
from octavo.obs.stats import RequestTimes
from octavo.obs.timeline import Timeline
from octavo.sampling_params import SamplingParams
from octavo.text.assembler import Assembler, Delta
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer
from octavo.types import AddRequest, SequenceOutput, WorkerInfo

logger = logging.getLogger("octavo.text_engine")

HEARTBEAT_GRACE = 2.0  # seconds without a heartbeat that are still no sign of a stall


class ReadyEvent(Protocol):
    """Set while requests are taken."""

    def is_set(self) -> bool: ...


class CoreClient(Protocol):
    """One engine core, or several as one; see `EngineClient`."""

    @property
    def info(self) -> WorkerInfo | None: ...
    @property
    def pulse(self) -> Pulse: ...
    @property
    def dead(self) -> EngineDead | None: ...
    @property
    def ready(self) -> ReadyEvent: ...
    def submit(self, requests: Sequence[AddRequest], listener: Listener) -> None: ...
    def abort(self, ids: Sequence[str]) -> None: ...
    async def control(self, op: str, **args: str) -> dict[str, str]: ...
    def cut(self, error: ServerError) -> None: ...


class CoreSource(Protocol):
    """Where the client of the running core is had; it changes when a core is restarted."""

    @property
    def client(self) -> CoreClient: ...
    @property
    def restarting(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    max_model_len: int
    vocab_size: int
    block_size: int
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class Health:
    """What the engine is doing, from its heartbeats."""

    phase: str  # loading, idle, running, draining, dead
    detail: str
    alive: bool
    ready: bool
    stalled_for: float  # seconds without a step while work waits, or without a heartbeat


@dataclass(slots=True)
class _Choice:
    """One sequence of a request on its way."""

    assembler: Assembler
    life: Life
    queued_tokens: int  # of its prompt, until it leaves the queue


def stalled_for(pulse: Pulse, now: float) -> float:
    """Seconds without a step while work waits, or without a heartbeat.

    Not counted is what a step of many tokens takes on a slow machine.
    """
    silent = now - pulse.heard_at
    stalled = silent if silent > HEARTBEAT_GRACE else 0.0
    if pulse.phase == "running" and pulse.pending:
        stalled = max(stalled, now - pulse.last_step - pulse.allowed)
    return stalled


class DeltaListener(Protocol):
    """Who hears the text of a request. Called in the event loop as soon as the engine has news."""

    def news(self, delta: Delta) -> None:
        """What is new of one choice; each ends with exactly one `finish_reason`."""
        ...

    def broken(self, error: Exception) -> None:
        """Nothing more will come, though not all choices have ended."""
        ...


class Answer:
    """A request in the engine: passes on the news of its choices until all have ended.

    Everything happens within the call that brings the news of a step, for all requests in one
    pass; there is no task and no queue for each of them.
    """

    __slots__ = ("_choices", "_client", "_engine", "_listener", "_timeline", "ids", "request_id")

    def __init__(
        self,
        engine: TextEngine,
        client: CoreClient,
        request_id: str,
        *,
        choices: dict[str, _Choice],
        listener: DeltaListener,
        timeline: Timeline | None = None,
    ) -> None:
        self._engine = engine
        self._client = client
        self.request_id = request_id
        self.ids = tuple(choices)
        self._choices = choices
        self._listener = listener
        self._timeline = timeline

    @property
    def ended(self) -> bool:
        """True once no more news will come."""
        return not self._choices

    def push(self, output: SequenceOutput) -> None:
        """The engine's news of one sequence."""
        choice = self._choices.get(output.id)
        if choice is None:
            return  # a stop text ended it before this step landed
        try:
            began = perf_counter()
            delta = choice.assembler.push(output)
            made = perf_counter()
            self._engine._observe(choice, output, delta)
            if delta.finish_reason is not None:
                self._finish(choice, output, delta.finish_reason)
            timeline = self._timeline
            if timeline is None:
                self._listener.news(delta)
                return
            timeline.detokenize += made - began
            observed = perf_counter()
            self._listener.news(delta)
            timeline.write += perf_counter() - observed
        except Exception as error:  # of this request alone
            logger.exception("event=news_failed")
            self.close()
            self._listener.broken(error)

    def fail(self, error: Exception) -> None:
        """The engine is lost, or shuts down."""
        if self._choices:
            self._leave_all("error")
            self._listener.broken(error)

    def close(self) -> None:
        """Ends what is left; the listener hears nothing more. Does nothing a second time."""
        if self._choices:
            self._client.abort(tuple(self._choices))
            self._leave_all("abort")

    def _finish(self, choice: _Choice, output: SequenceOutput, reason: str) -> None:
        del self._choices[output.id]
        self._engine._leave(choice, reason)
        if output.reason is None:
            self._client.abort((output.id,))
        if not self._choices:
            self._engine._forget(self)

    def _leave_all(self, reason: str) -> None:
        choices = tuple(self._choices.values())
        self._choices.clear()
        for choice in choices:
            self._engine._leave(choice, reason)
        self._engine._forget(self)


class _Inbox:
    """A listener for those who would rather wait for news than be called."""

    def __init__(self) -> None:
        self._news: deque[Delta] = deque()
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __bool__(self) -> bool:
        return bool(self._news) or self._error is not None

    def news(self, delta: Delta) -> None:
        self._news.append(delta)
        self._wake()

    def broken(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def take(self) -> list[Delta]:
        """All news since the last call, at least one; raises what broke the request."""
        while not self._news:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        found = list(self._news)
        self._news.clear()
        return found


class TextEngine:
    """One engine, spoken to in text."""

    def __init__(
        self,
        source: CoreSource,
        *,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        model_names: tuple[str, ...],
        max_logprobs: int,
        admission: Admission,
        metrics: Metrics,
        generation_defaults: dict[str, object],
        settings: list[tuple[str, str, str]],
        seed: int | None = None,
        first_number: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_names = model_names
        self.metrics = metrics
        self.generation_defaults = generation_defaults
        self.settings = settings
        self._source = source
        self._max_logprobs = max_logprobs
        self._door = Door(admission, metrics, clock)
        self._clock = clock
        self._numbers = itertools.count(first_number)
        self._draining = False
        self._idle = asyncio.Event()
        self._by_request: dict[str, list[Answer]] = {}  # by the caller's id
        self._seeds = request_seeds(seed)
        self._grammars = GrammarCompiler(vocabulary_of(tokenizer))

    @property
    def limits(self) -> Limits:
        """Raises EngineDead while the model is still loading."""
        info = self._source.client.info
        if info is None:
            raise EngineDead("the model is still loading")
        return Limits(info.max_model_len, info.vocab_size, info.block_size, self._max_logprobs)

    @property
    def health(self) -> Health:
        """From the core's last heartbeat; costs nothing."""
        client = self._source.client
        pulse, now = client.pulse, self._clock()
        alive = client.dead is None and not self._source.restarting
        phase = "draining" if self._draining and alive else pulse.phase
        ready = alive and client.ready.is_set() and not self._draining
        return Health(phase, pulse.detail, alive, ready, stalled_for(pulse, now))

    @property
    def num_open(self) -> int:
        """Sequences that have been admitted and have not ended."""
        return self._door.num_open

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        listener: DeltaListener,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        deadline: float = 0.0,
        cache_salt: str = "",
        tenant: str = "",
        weight: float = 1.0,
        timeline: Timeline | None = None,
    ) -> Answer:
        """Starts a request; `listener` hears all choices, interleaved, until each has ended.

        `tenant` is whose share of the engine it takes. `admit` comes first where the queue is
        bounded. Raises Draining whenever the server shuts
        down, EngineDead whenever the core is lost.
        """
        self._require_open()
        requests = expand(
            prompt_ids,
            params,
            Scheduling(arrival, priority, deadline, cache_salt, tenant, weight),
            group=str(next(self._numbers)),  # callers' ids may clash, these never do
            tokenizer=self.tokenizer,
            max_model_len=self.limits.max_model_len,
            vocab_size=self.limits.vocab_size,
            seed=self._seeds.getrandbits(64),
            grammar=self._grammars.form(params.structured_outputs),  # which `compile` has made
        )
        choices = {
            request.id: self._choice(index, request, params)
            for index, request in enumerate(requests)
        }
        client = self._source.client
        answer = Answer(
            self, client, request_id, choices=choices, listener=listener, timeline=timeline
        )
        if timeline is not None:
            for core_id, choice in choices.items():
                timeline.add(core_id, choice.life.times)
        client.submit(requests, answer)
        self._by_request.setdefault(request_id, []).append(answer)
        self._idle.clear()
        for choice in choices.values():
            self._door.enter(choice.life.times, choice.queued_tokens)
        return answer

    async def generate(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        arrival: float,
        priority: int = 0,
        deadline: float = 0.0,
        cache_salt: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """As `open`, for those who would rather iterate; closing the iterator aborts the rest.

        Compiles structured outputs first.
        """
        await self.compile(params)
        inbox = _Inbox()
        answer = self.open(
            prompt_ids,
            params,
            inbox,
            request_id=request_id,
            arrival=arrival,
            priority=priority,
            deadline=deadline,
            cache_salt=cache_salt,
        )
        try:
            while inbox or not answer.ended:
                for delta in await inbox.take():
                    yield delta
        finally:
            answer.close()

    async def compile(self, params: SamplingParams) -> Form | None:
        """The grammar of the settings' structured outputs, None without them.

        The last ones are remembered; others take milliseconds to two seconds, in a process of their
        own. Raises InvalidRequest for what cannot be enforced.
        """
        wanted = params.structured_outputs
        if wanted is None:
            return None
        form = self._grammars.known(wanted)
        if form is None:
            form = await asyncio.wrap_future(self._grammars.submit(wanted))
        return form

    def abort(self, request_id: str) -> None:
        """Ends all requests of a caller's id; their choices finish with `abort`."""
        for answer in tuple(self._by_request.get(request_id, ())):
            self._source.client.abort(answer.ids)
            for sequence in answer.ids:
                answer.push(SequenceOutput(sequence, [], reason="abort"))

    async def control(self, op: str, **args: str) -> dict[str, str]:
        """An operation on the whole engine, such as `reset_prefix_cache`."""
        return await self._source.client.control(op, **args)

    async def drain(self, timeout: float, hurry: asyncio.Event | None = None) -> int:
        """Takes nothing new, waits for what runs, cuts the rest; how many were cut.

        Setting `hurry` ends the wait at once.
        """
        self._draining = True
        if self._door.num_open:
            self._idle.clear()
            waits = [asyncio.ensure_future(self._idle.wait())]
            if hurry is not None:
                waits.append(asyncio.ensure_future(hurry.wait()))
            await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        if cut := self._door.num_open:
            self._source.client.cut(
                Draining(
                    "The answer was cut off and is not complete: the server is shutting down, and "
                    + (
                        "was told not to wait. Ask again."
                        if hurry is not None and hurry.is_set()
                        else f"what runs gets no more than {timeout:g} s. Ask again."
                    )
                )
            )
            return cut
        return 0

    def admit(self, sequences: int, prompt_tokens: int, tenant: str = "") -> None:
        """Asks for room in the queue for all sequences of a caller's request; see `Door.admit`."""
        self._require_open()
        self._door.admit(sequences, prompt_tokens, tenant)

    def _require_open(self) -> None:
        if self._draining:
            raise Draining("The server is shutting down and takes no new requests.")
        if (dead := self._source.client.dead) is not None:
            raise dead

    def _choice(self, index: int, request: AddRequest, params: SamplingParams) -> _Choice:
        assembler = Assembler(self.tokenizer, params, index=index, eos_ids=self.tokenizer.eos_ids)
        times = RequestTimes(
            arrival=request.arrival,
            prompt_tokens=len(request.prompt_ids),
            n=params.n,
            max_tokens=request.params.max_tokens,
            tenant=request.tenant,
        )
        return _Choice(assembler, Life(self.metrics, times), len(request.prompt_ids))

    def _forget(self, answer: Answer) -> None:
        """All choices of a request have ended."""
        answers = self._by_request[answer.request_id]
        answers.remove(answer)
        if not answers:
            del self._by_request[answer.request_id]

    def _leave_queue(self, choice: _Choice) -> None:
        self._door.leave_queue(choice.queued_tokens)
        choice.queued_tokens = 0

    def _leave(self, choice: _Choice, reason: str) -> None:
        now = self._clock()
        self._leave_queue(choice)
        choice.life.end(reason, now)
        self._door.leave(choice.life.times, now)
        if not self._door.num_open:
            self._idle.set()

    def _observe(self, choice: _Choice, output: SequenceOutput, delta: Delta) -> None:
        if choice.queued_tokens:
            self._leave_queue(choice)
        delta.times = choice.life.times
        choice.life.news(output, len(delta.token_ids), self._clock())
