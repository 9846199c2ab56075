"""AsyncLLMEngine: the engine for asyncio programs, under the names that programs already use.

The core runs in a process of its own, so that computing never holds up the caller's event loop.
Not for: HTTP (`server/`) or scripts that just want answers (`llm.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from typing import Any

from octavo.admission import Admission
from octavo.collect import OutputCollector
from octavo.errors import ConfigError, EngineDead, InvalidRequest
from octavo.foreign import ASYNC_ENGINE_ABSENT, absent_method, refuse_kwargs, refuse_lora
from octavo.frontend import Frontend
from octavo.obs.metrics import Metrics
from octavo.options import EngineArgs
from octavo.outputs import RequestOutput
from octavo.prompts import PromptType, check_length, encode_prompt
from octavo.replicas import Replicas, supervise
from octavo.sampling_params import SamplingParams
from octavo.supervisor import Supervisor
from octavo.text.tokenizer import Tokenizer
from octavo.text_engine import TextEngine

UNLIMITED = 2**31


class AsyncLLMEngine:
    """One engine; make it with `from_engine_args`, use it within one event loop."""

    def __init__(self, args: EngineArgs) -> None:
        self._args = args
        self._frontend = Frontend.open(args)
        self._supervisor: Supervisor | Replicas | None = None
        self._engine: TextEngine | None = None
        self._starting = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None  # the one of the first request
        self._stopped = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        start_engine_loop: bool = True,
        usage_context: object = None,
        stat_loggers: None = None,
    ) -> AsyncLLMEngine:
        """Opens the model; its process starts with the first request, or with `start`.

        `start_engine_loop` and `usage_context` are taken for the sake of existing programs: there
        is no loop to start before the first request, and no usage is reported to anybody.
        """
        if stat_loggers is not None:
            raise ConfigError("stat_loggers: not offered; read the metrics.", "stat_loggers")
        return cls(engine_args)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says what to do instead of a method that others have."""
        raise absent_method("AsyncLLMEngine", name, ASYNC_ENGINE_ABSENT)

    @property
    def is_running(self) -> bool:
        """True between the first request and the end."""
        return self._supervisor is not None and not self._stopped and not self.errored

    @property
    def is_stopped(self) -> bool:
        """True after `shutdown`."""
        return self._stopped

    @property
    def errored(self) -> bool:
        """True if the engine has died and was not restarted."""
        return self._supervisor is not None and self._supervisor.failure.done()

    @property
    def dead_error(self) -> BaseException:
        """Why the engine died."""
        if self._supervisor is not None and self._supervisor.failure.done():
            return self._supervisor.failure.result()
        return EngineDead("the engine is starting again")

    async def start(self) -> TextEngine:
        """Starts the engine's process once, and waits until it takes requests."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():
            raise EngineDead("the engine belongs to another event loop; make one for this loop")
        async with self._starting:
            if self._stopped:
                raise EngineDead("the engine has been shut down")
            if self._engine is None:
                self._engine = await self._launch()
        return self._engine

    async def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        prompt_text: str | None = None,
        lora_request: None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request as `sampling_params.output_kind` says; the last is `finished`.

        Closing the generator aborts the request. `prompt_text` is the text of a prompt that comes
        as ids; `trace_headers` and `session_id` change nothing.
        """
        refuse_lora(lora_request)
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs)
        if data_parallel_rank:
            raise InvalidRequest(
                f"data_parallel_rank = {data_parallel_rank!r}: there is one engine; use 0.",
                "data_parallel_rank",
            )
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id = {request_id!r} must be a text.", "request_id")
        sampling_params.verify()  # a record can be changed after it was made
        arrival = time.monotonic()
        engine = await self.start()
        encoded = encode_prompt(prompt, self._frontend.tokenizer)
        limits = engine.limits
        sampling_params.check_model(vocab_size=limits.vocab_size, max_logprobs=limits.max_logprobs)
        check_length(len(encoded.ids), limits.max_model_len, None)
        text = prompt_text if encoded.text is None else encoded.text
        collector = OutputCollector(request_id, text, encoded.ids, sampling_params)
        deltas = engine.generate(
            encoded.ids,
            sampling_params,
            request_id=request_id,
            arrival=arrival,
            priority=priority,
        )
        async with aclosing(deltas):
            async for delta in deltas:
                output = collector.add(delta)
                if output is not None:
                    yield output

    async def abort(self, request_id: str | Iterable[str], internal: bool = False) -> None:
        """Ends requests by the ids that `generate` got; their generators end with `abort`."""
        engine = await self.start()
        for one in [request_id] if isinstance(request_id, str) else request_id:
            engine.abort(one)

    async def check_health(self) -> None:
        """Raises EngineDead if the engine cannot answer."""
        engine = await self.start()
        if not engine.health.alive:
            raise self.dead_error

    async def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._frontend.tokenizer

    async def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; blocks in use stay with their sequences."""
        result = await (await self.start()).control("reset_prefix_cache")
        return result.get("reset") == "true"

    def get_num_unfinished_requests(self) -> int:
        """Sequences that run or wait."""
        return 0 if self._engine is None else self._engine.num_open

    async def wait_for_requests_to_drain(self, drain_timeout: float = 300) -> None:
        """Waits until nothing runs; raises TimeoutError after `drain_timeout` seconds."""
        deadline = time.monotonic() + drain_timeout
        while self.get_num_unfinished_requests():
            if time.monotonic() > deadline:
                raise TimeoutError(f"requests are still running after {drain_timeout} s")
            await asyncio.sleep(0.05)

    async def close(self) -> None:
        """Ends the engine's process and waits for its end."""
        self._stopped = True
        if self._supervisor is not None:
            await self._supervisor.stop()

    def shutdown(self, timeout: float | None = None) -> None:
        """Ends the engine's process without waiting for it."""
        self._stopped = True
        if self._supervisor is not None:
            self._supervisor.kill()

    async def _launch(self) -> TextEngine:
        metrics = Metrics(
            self._args.model,
            max_model_len=self._frontend.longest or 1,
        )
        replicas = self._args.data_parallel_size
        self._supervisor = supervise(self._frontend, metrics, replicas)
        await self._supervisor.start()
        try:
            await self._supervisor.ready()
        except BaseException:
            await self._supervisor.stop()
            raise
        return TextEngine(
            self._supervisor,
            tokenizer=self._frontend.tokenizer,
            chat_template=self._frontend.chat_template,
            model_names=(self._args.model,),
            max_logprobs=self._args.max_logprobs,
            admission=Admission(replicas * self._frontend.scheduler.max_num_seqs, UNLIMITED),
            metrics=metrics,
            generation_defaults=self._frontend.sampling_defaults,
            settings=[(n, str(v), s) for n, v, s in self._args.effective()],
            seed=self._args.seed if "seed" in self._args.sources else None,
        )
