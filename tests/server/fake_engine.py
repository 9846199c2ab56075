"""An engine without a model: real tokenizer, template and assembler, tokens from a script.

It speaks the interface that the server is built on, keeps count of what runs, and can be told to
fail in every way that a real one does.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.errors import EngineDead, OctavoError, Overloaded
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.vocabulary import vocabulary_of
from octavo.obs.metrics import Metrics
from octavo.obs.stats import RequestTimes
from octavo.sampling_params import SamplingParams
from octavo.server.engine import Listener
from octavo.text.assembler import Assembler, Delta
from octavo.text.chat import ChatTemplate
from octavo.types import SequenceOutput, StepStats, TokenLogprobs
from tests.text.samples import CHATML, chat_tokenizer

ANSWER = " The owls 🦉 hoot at night, 日本語 too. crème brûlée naïve 1, 2, 3."
MAX_MODEL_LEN = 256

Script = Callable[[list[int], int], list[int]]


@dataclass(frozen=True)
class FakeLimits:
    max_model_len: int = MAX_MODEL_LEN
    vocab_size: int = 0
    max_logprobs: int = 20


@dataclass(frozen=True)
class FakeHealth:
    phase: str = "idle"
    detail: str = ""
    alive: bool = True
    ready: bool = True
    stalled_for: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What one call of `generate` was given."""

    prompt_ids: list[int]
    params: SamplingParams
    options: dict[str, object]


@dataclass
class Faults:
    """How the engine fails; counts are in tokens of a choice."""

    refuse: OctavoError | None = None  # raised before the first delta
    die_after: int | None = None
    crash_after: int | None = None  # an exception that nobody foresaw
    end_after: int | None = None
    end_reason: str = "error"


@dataclass
class FakeEngine:
    """See the module. `gate` holds back every token until it is set."""

    script: Script | None = None
    model_names: tuple[str, ...] = ("owl-1", "owl/alias")
    generation_defaults: dict[str, object] = field(default_factory=dict)
    settings: list[tuple[str, object, str]] = field(
        default_factory=lambda: [("max_num_seqs", 8, "flag"), ("port", 0, "default")]
    )
    health: FakeHealth = field(default_factory=FakeHealth)
    faults: Faults = field(default_factory=Faults)
    num_cached: int = 0
    step_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.tokenizer = chat_tokenizer()
        self.chat_template: ChatTemplate | None = ChatTemplate(CHATML, self.tokenizer)
        self.grammars = GrammarCompiler(vocabulary_of(self.tokenizer))
        self.limits = FakeLimits(vocab_size=self.tokenizer.vocab_size)
        self.metrics = Metrics("owl-1", max_model_len=MAX_MODEL_LEN)
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = 0
        self.aborted = 0
        self.seen: list[Seen] = []
        self.controls: list[str] = []
        self.callers: list[tuple[str, float]] = []  # tenant and weight of each request

    def set_health(self, **changes: object) -> None:
        self.health = replace(self.health, **changes)  # type: ignore[arg-type]

    async def control(self, op: str, **args: str) -> dict[str, str]:
        self.controls.append(op)
        return {"done": op}

    def admit(self, sequences: int, prompt_tokens: int, tenant: str = "") -> None:
        if isinstance(self.faults.refuse, Overloaded):
            raise self.faults.refuse

    async def compile(self, params: SamplingParams) -> object:
        wanted = params.structured_outputs
        return None if wanted is None else await asyncio.wrap_future(self.grammars.submit(wanted))

    def open(
        self, prompt_ids: list[int], params: SamplingParams, listener: Listener, **options: Any
    ) -> FakeAnswer:
        """As the interface says; the news are those of `generate`."""
        tenant, weight = options.pop("tenant", ""), options.pop("weight", 1.0)
        timeline = options.pop("timeline", None)
        self.callers.append((tenant, weight))
        if timeline is not None:
            times = RequestTimes(options["arrival"], prompt_tokens=len(prompt_ids), tenant=tenant)
            timeline.add(f"core-{len(self.callers)}", times)
        return FakeAnswer(self.generate(prompt_ids, params, **options), listener)

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
    ) -> AsyncIterator[Delta]:
        options = {
            "request_id": request_id,
            "priority": priority,
            "deadline": deadline - arrival if deadline else 0.0,
            "cache_salt": cache_salt,
        }
        self.seen.append(Seen(prompt_ids, params, options))
        if self.faults.refuse is not None:
            raise self.faults.refuse
        choices = [_Choice(self, prompt_ids, params, index) for index in range(params.n)]
        self._move(len(choices))
        try:
            while live := [choice for choice in choices if not choice.finished]:
                await self.gate.wait()
                await asyncio.sleep(self.step_seconds)
                for choice in live:
                    delta = choice.step()
                    if choice.finished:
                        self._end(choice, arrival, delta.finish_reason or "")
                    yield delta
        finally:
            for choice in choices:
                if not choice.finished:
                    self.aborted += 1
                    self._end(choice, arrival, "abort")

    def _move(self, change: int) -> None:
        self.running += change
        self.metrics.step(StepStats(running=self.running))

    def _end(self, choice: _Choice, arrival: float, reason: str) -> None:
        choice.finished = True
        self._move(-1)
        times = RequestTimes(arrival, arrival + 1, reason, generation_tokens=choice.made)
        self.metrics.finished(times)


class FakeAnswer:
    """Pumps the deltas of a request to its listener, as the real engine would call it."""

    def __init__(self, deltas: AsyncIterator[Delta], listener: Listener) -> None:
        self._task = asyncio.ensure_future(self._pump(deltas, listener))

    async def _pump(self, deltas: AsyncIterator[Delta], listener: Listener) -> None:
        try:
            async for delta in deltas:
                listener.news(delta)
        except Exception as error:
            listener.broken(error)
        finally:
            if isinstance(deltas, AsyncGenerator):
                await deltas.aclose()

    def close(self) -> None:
        if self._task is not asyncio.current_task():
            self._task.cancel()


class _Choice:
    """One sequence and its script."""

    def __init__(
        self, engine: FakeEngine, prompt_ids: list[int], params: SamplingParams, index: int
    ) -> None:
        self._engine = engine
        self._prompt_ids = prompt_ids
        self._params = params
        eos = engine.tokenizer.eos_ids
        # The script is what the answer looks like, whatever form it should have.
        self._token_params = msgspec.structs.replace(
            params, structured_outputs=None
        ).to_token_params(
            engine.tokenizer,
            eos_ids=eos,
            max_tokens=params.max_tokens or engine.limits.max_model_len - len(prompt_ids),
            index=index,
        )
        self._assembler = Assembler(engine.tokenizer, params, index=index, eos_ids=eos)
        if engine.script is not None:
            self._tokens = engine.script(prompt_ids, index)
        else:
            self._tokens = [*engine.tokenizer.encode_plain(ANSWER)[index:], 2]
        self.made = 0
        self.finished = False

    def step(self) -> Delta:
        faults = self._engine.faults
        if faults.die_after == self.made:
            raise EngineDead("the engine core is gone")
        if faults.crash_after == self.made:
            raise ZeroDivisionError("a fault")
        token = self._tokens[self.made % len(self._tokens)]
        self.made += 1
        reason, stop_id = None, None
        if token in self._token_params.stop_ids and self.made > self._token_params.min_tokens:
            reason, stop_id = "stop", token
        elif self.made >= self._token_params.max_tokens:
            reason = "length"
        if faults.end_after is not None and self.made >= faults.end_after:
            reason, stop_id = faults.end_reason, None
        output = SequenceOutput(
            id="x",
            new_ids=[token],
            reason=reason,  # type: ignore[arg-type]
            stop_id=stop_id,
            logprobs=self._logprobs(token),
            prompt_logprobs=self._prompt_logprobs() if self.made == 1 else None,
            num_cached=self._engine.num_cached if self.made == 1 else 0,
            pooled=self._pooled() if self.made == 1 else b"",
            error="out of luck" if reason == "error" else "",
        )
        delta = self._assembler.push(output)
        self.finished = delta.finish_reason is not None
        return delta

    def _pooled(self) -> bytes:
        """A vector of four numbers that tells prompts and kinds of pooling apart."""
        if not self._token_params.pooling:
            return b""
        first = 1.0 if self._token_params.pooling == "mean" else 0.0
        ids = self._prompt_ids
        return array("f", [first, sum(ids), len(ids), ids[-1]]).tobytes()

    def _logprobs(self, token: int) -> list[TokenLogprobs] | None:
        wanted = self._token_params.logprobs
        return None if wanted is None else [self._entry(token, wanted)]

    def _prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        wanted = self._token_params.prompt_logprobs
        if wanted is None:
            return None
        return [None, *(self._entry(token, wanted) for token in self._prompt_ids[1:])]

    def _entry(self, token: int, wanted: int) -> TokenLogprobs:
        size = self._engine.tokenizer.vocab_size
        tops = [(token + place) % size for place in range(wanted)]
        values = [float("-inf") if top % 7 == 3 else -0.5 - place for place, top in enumerate(tops)]
        values = sorted(values, reverse=True)
        return TokenLogprobs([token, *tops], [values[0] if values else -0.25, *values], 1)


def strict_loads(data: bytes | str) -> object:
    """JSON without NaN and Infinity."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    return json.loads(data, parse_constant=refuse)
