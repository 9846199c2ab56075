"""What the server needs of an engine: the interface that `TextEngine` and the test fake speak.

Not for: anything that runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from octavo.obs.metrics import Metrics
from octavo.obs.timeline import Timeline
from octavo.sampling_params import SamplingParams
from octavo.text.assembler import Delta
from octavo.text.chat import ChatTemplate
from octavo.text.tokenizer import Tokenizer


class Limits(Protocol):
    """What a request may ask for, in tokens."""

    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_logprobs(self) -> int: ...


class Health(Protocol):
    """What the engine is doing."""

    @property
    def phase(self) -> str: ...  # loading, idle, running, draining, dead
    @property
    def detail(self) -> str: ...
    @property
    def alive(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def stalled_for(self) -> float: ...  # seconds


class Listener(Protocol):
    """Who hears the news of one request. Called in the event loop."""

    def news(self, delta: Delta) -> None:
        """What is new of one choice; each ends with exactly one `finish_reason`."""
        ...

    def broken(self, error: Exception) -> None:
        """Nothing more will come, though not all choices have ended."""
        ...


class Answer(Protocol):
    """A request in the engine."""

    def close(self) -> None:
        """Aborts what still runs; nothing more is heard."""
        ...


class Engine(Protocol):
    """Requests in, text deltas out."""

    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def chat_template(self) -> ChatTemplate | None: ...
    @property
    def model_names(self) -> tuple[str, ...]: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def generation_defaults(self) -> Mapping[str, object]: ...
    @property
    def settings(self) -> Sequence[tuple[str, object, str]]: ...
    @property
    def health(self) -> Health: ...
    @property
    def metrics(self) -> Metrics: ...

    def admit(self, sequences: int, prompt_tokens: int, tenant: str = "") -> None:
        """Asks for room for all sequences of a request; raises Overloaded."""
        ...

    async def compile(self, params: SamplingParams) -> object:
        """Comes before `open` where settings demand a form. Raises InvalidRequest."""
        ...

    def open(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        listener: Listener,
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
        """Starts a request; `listener` hears all choices, interleaved."""
        ...

    async def control(self, op: str, **args: str) -> dict[str, str]:
        """An operation on the whole engine."""
        ...
