"""LLMEngine: the engine in this process, one step at a time, for programs with a loop of their own.

`LLM` is built on it. Not for: serving several callers at once (`async_engine.py`, `octavo serve`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from octavo.collect import OutputCollector
from octavo.core import build_core
from octavo.errors import ConfigError, InvalidRequest
from octavo.expand import Scheduling, expand, request_seeds
from octavo.foreign import LLM_ENGINE_ABSENT, absent_method, refuse_kwargs, refuse_lora
from octavo.frontend import Frontend
from octavo.grammar.compiler import GrammarCompiler
from octavo.grammar.vocabulary import vocabulary_of
from octavo.obs.life import Life
from octavo.obs.metrics import Metrics
from octavo.obs.reader import Metric, read_metrics
from octavo.obs.stats import RequestTimes
from octavo.options import EngineArgs
from octavo.outputs import RequestOutput
from octavo.prompts import EncodedPrompt, PromptType, check_length, encode_prompt
from octavo.sampling_params import SamplingParams
from octavo.text.assembler import Assembler
from octavo.text.tokenizer import Tokenizer
from octavo.types import SequenceOutput


@dataclass(slots=True)
class _Choice:
    """One sequence of a request on its way."""

    request: _Running
    assembler: Assembler
    life: Life


@dataclass(slots=True)
class _Running:
    """One request on its way."""

    id: str
    collector: OutputCollector
    choices: dict[str, _Choice] = field(default_factory=dict)  # by sequence id, until they end


class LLMEngine:
    """One model; requests go in by `add_request`, and their outputs come from `step`.

    Raises ConfigError or CheckpointError if the model cannot be loaded as asked.
    """

    def __init__(self, args: EngineArgs, *, chat_template: str | None = None) -> None:
        self.args = args
        if args.data_parallel_size > 1:
            raise ConfigError(
                f"{args.label('data_parallel_size')}: this is one engine in the caller's process; "
                "use `octavo serve` or AsyncLLMEngine for several, or 1.",
                "data_parallel_size",
            )
        self.frontend = Frontend.open(args, chat_template=chat_template, offline=True)
        self._core, self.info = build_core(
            self.frontend.worker, self.frontend.scheduler, report=lambda _: None
        )
        self._metrics = Metrics(args.model, max_model_len=self.info.max_model_len)
        self._numbers = itertools.count()
        self._seeds = request_seeds(args.seed if "seed" in args.sources else None)
        self._grammars = GrammarCompiler(vocabulary_of(self.frontend.tokenizer))
        self._requests: dict[str, _Running] = {}
        self._choices: dict[str, _Choice] = {}  # by sequence id

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: object = None,
        stat_loggers: None = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """The engine of these options; `usage_context` is taken and not used."""
        if stat_loggers is not None:
            raise InvalidRequest("stat_loggers: not offered; use get_metrics.", "stat_loggers")
        if enable_multiprocessing:
            raise InvalidRequest(
                "enable_multiprocessing: this engine is in the caller's process; use "
                "AsyncLLMEngine for one that is not.",
                "enable_multiprocessing",
            )
        return cls(engine_args)

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says what to do instead of a method that others have."""
        raise absent_method("LLMEngine", name, LLM_ENGINE_ABSENT)

    def add_request(
        self,
        request_id: str,
        prompt: PromptType | EncodedPrompt,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: None = None,
        *,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: object = None,
        priority: int = 0,
    ) -> str:
        """Queues a request; its id. Raises InvalidRequest for what cannot be served.

        `arrival_time` is `time.time()` seconds, now if left out. `trace_headers` are not used.
        """
        refuse_lora(lora_request)
        refuse_kwargs(tokenization_kwargs=tokenization_kwargs)
        if not isinstance(request_id, str):
            raise InvalidRequest(f"request_id = {request_id!r} must be a text.", "request_id")
        if request_id in self._requests:
            raise InvalidRequest(f"request_id = {request_id!r} is running already.", "request_id")
        tokenizer = self.frontend.tokenizer
        if not isinstance(prompt, EncodedPrompt):
            prompt = encode_prompt(prompt, tokenizer)
        self.check(prompt, params)
        arrival = time.monotonic()
        if arrival_time is not None:
            arrival -= max(0.0, time.time() - arrival_time)
        sequences = expand(
            prompt.ids,
            params,
            Scheduling(arrival, priority),
            group=str(next(self._numbers)),
            tokenizer=tokenizer,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            seed=self._seeds.getrandbits(64),
            grammar=self._grammars.form(params.structured_outputs),
        )
        collector = OutputCollector(request_id, prompt.text, prompt.ids, params)
        running = self._requests[request_id] = _Running(request_id, collector)
        for index, sequence in enumerate(sequences):
            times = RequestTimes(
                arrival,
                prompt_tokens=len(prompt.ids),
                n=params.n,
                max_tokens=sequence.params.max_tokens,
            )
            choice = _Choice(
                running,
                Assembler(tokenizer, params, index=index, eos_ids=tokenizer.eos_ids),
                Life(self._metrics, times),
            )
            running.choices[sequence.id] = self._choices[sequence.id] = choice
            self._core.add(sequence)
        return request_id

    def check(self, prompt: EncodedPrompt, params: SamplingParams) -> None:
        """Raises InvalidRequest for a request that this model cannot serve."""
        params.verify()  # a record can be changed after it was made
        params.check_model(vocab_size=self.info.vocab_size, max_logprobs=self.args.max_logprobs)
        check_length(len(prompt.ids), self.info.max_model_len, None)
        self._grammars.form(params.structured_outputs)  # remembered for `add_request`

    def step(self) -> list[RequestOutput]:
        """One step of the engine; the outputs of requests with news, as each asked for them."""
        made: list[RequestOutput] = []
        news, now = self._turn(), time.monotonic()
        for output in news:
            choice = self._choices.get(output.id)
            if choice is None:
                continue  # a stop text ended it before this step landed
            delta = choice.assembler.push(output)
            delta.times = choice.life.times
            choice.life.news(output, len(delta.token_ids), now)
            if delta.finish_reason is not None:
                self._end(output.id, choice, delta.finish_reason)
                if output.reason is None:  # a stop text ended it, the core does not know
                    self._core.abort([output.id])
            shown = choice.request.collector.add(delta)
            if shown is not None:
                made.append(shown)
        return made

    def _turn(self) -> list[SequenceOutput]:
        outputs = self._core.step()
        if outputs is None:
            return []
        self._metrics.step(outputs.stats)
        return outputs.outputs

    def _end(self, sequence: str, choice: _Choice, reason: str) -> None:
        choice.life.end(reason, time.monotonic())
        del self._choices[sequence]
        del choice.request.choices[sequence]
        if not choice.request.choices:
            del self._requests[choice.request.id]

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests; no output of theirs comes any more. Unknown ids are no error."""
        for request_id in [request_ids] if isinstance(request_ids, str) else list(request_ids):
            running = self._requests.get(request_id)
            if running is None:
                continue
            sequences = list(running.choices.items())
            self._core.abort([sequence for sequence, _ in sequences])
            for sequence, choice in sequences:
                self._end(sequence, choice, "abort")
        if not self._requests:
            while self._core.has_work():  # the core gives the pages back in its next turn
                self._turn()

    def has_unfinished_requests(self) -> bool:
        """True while a request runs or waits."""
        return bool(self._requests)

    def get_num_unfinished_requests(self) -> int:
        """Requests that run or wait."""
        return len(self._requests)

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.frontend.tokenizer

    def get_metrics(self) -> list[Metric]:
        """A picture of all metrics, under the names of the route /metrics."""
        return read_metrics(self._metrics)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; blocks in use stay with their sequences."""
        return self._core.control("reset_prefix_cache", {}).get("reset") == "true"

    def shutdown(self) -> None:
        """Frees the model; the object cannot be used afterwards."""
        self._core.close()
