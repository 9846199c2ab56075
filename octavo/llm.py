"""LLM: the engine in this process, for scripts. The same core as the server's, without sockets.

Not for: serving several callers at once (`async_engine.py`, `octavo serve`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

from octavo.collect import OutputCollector
from octavo.core import build_core
from octavo.errors import InvalidRequest
from octavo.expand import Scheduling, expand, request_seeds
from octavo.frontend import Frontend
from octavo.options import EngineArgs
from octavo.outputs import RequestOutput
from octavo.prompts import EncodedPrompt, PromptType, check_length, encode_prompt, is_single
from octavo.sampling_params import SamplingParams
from octavo.text.assembler import Assembler

Message: TypeAlias = dict[str, Any]


@dataclass(slots=True)
class _Running:
    """One request of a call on its way."""

    collector: OutputCollector
    assemblers: dict[str, Assembler]  # by sequence id
    output: RequestOutput | None = None


class LLM:
    """A model in this process.

    Keywords are the fields of `EngineArgs`. Raises ConfigError or CheckpointError if the model
    cannot be loaded as asked.
    """

    def __init__(self, model: str | None = None, **options: Any) -> None:
        if model is not None:
            options["model"] = model
        chat_template = options.pop("chat_template", None)
        self._start(EngineArgs(**options), chat_template)

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> LLM:
        """A model from options that were gathered elsewhere, such as on a command line."""
        llm = cls.__new__(cls)
        llm._start(args, None)
        return llm

    def _start(self, args: EngineArgs, chat_template: str | None) -> None:
        self.model = args.model
        self._frontend = Frontend.open(args, chat_template=chat_template, offline=True)
        self._args = args
        self._core, self.info = build_core(
            self._frontend.worker, self._frontend.scheduler, report=lambda _: None
        )
        self._numbers = itertools.count()
        self._seeds = request_seeds(args.seed if "seed" in args.sources else None)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._frontend.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults of the model's generation_config.json over those of SamplingParams."""
        return SamplingParams(**self._frontend.sampling_defaults)

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; blocks in use stay with their sequences."""
        return self._core.control("reset_prefix_cache", {}).get("reset") == "true"

    def shutdown(self) -> None:
        """Frees the model; the object cannot be used afterwards."""
        self._core.close()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: list[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, a TextPrompt or a TokensPrompt. One
        SamplingParams serves for all prompts, a list has one each.
        """
        _refuse_lora(lora_request)
        single = is_single(prompts)
        every = [cast(PromptType, prompts)] if single else list(cast(Sequence[PromptType], prompts))
        encoded = [encode_prompt(prompt, self._frontend.tokenizer) for prompt in every]
        return self._run(encoded, sampling_params, priority, use_tqdm)

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: list[int] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of conversations."""
        _refuse_lora(lora_request)
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message.", "messages")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        encoded = [
            self._frontend.encode_chat(
                list(cast(list[Message], conversation)),
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]
        return self._run(encoded, sampling_params, priority, use_tqdm)

    def _run(
        self,
        prompts: list[EncodedPrompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: list[int] | None,
        progress: bool,
    ) -> list[RequestOutput]:
        every = self._params(params, len(prompts))
        priorities = priority or [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"priority has {len(priorities)} values for {len(prompts)} prompts.", "priority"
            )
        for prompt, own in zip(prompts, every, strict=True):
            own.verify()  # a record can be changed after it was made
            own.check_model(vocab_size=self.info.vocab_size, max_logprobs=self._args.max_logprobs)
            check_length(len(prompt.ids), self.info.max_model_len, None)
        requests: list[_Running] = []
        by_id: dict[str, _Running] = {}
        try:
            for prompt, own, rank in zip(prompts, every, priorities, strict=True):
                requests.append(self._add(prompt, own, rank, by_id))
            for request in _progress(self._finished(by_id), len(requests), progress):
                assert request.output is not None
        finally:
            self._core.abort(list(by_id))
            while self._core.has_work():
                self._core.step()
        return [request.output for request in requests if request.output is not None]

    def _params(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            return [self.get_default_sampling_params()] * count
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise InvalidRequest(
                f"sampling_params has {len(params)} records for {count} prompts.",
                "sampling_params",
            )
        return list(params)

    def _add(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams,
        priority: int,
        by_id: dict[str, _Running],
    ) -> _Running:
        number = str(next(self._numbers))
        tokenizer = self._frontend.tokenizer
        sequences = expand(
            prompt.ids,
            params,
            Scheduling(time.monotonic(), priority),
            group=number,
            tokenizer=tokenizer,
            max_model_len=self.info.max_model_len,
            vocab_size=self.info.vocab_size,
            seed=self._seeds.getrandbits(64),
        )
        running = _Running(OutputCollector(number, prompt.text, prompt.ids, params), {})
        for index, sequence in enumerate(sequences):
            running.assemblers[sequence.id] = Assembler(
                tokenizer, params, index=index, eos_ids=tokenizer.eos_ids
            )
            by_id[sequence.id] = running
            self._core.add(sequence)
        return running

    def _finished(self, by_id: dict[str, _Running]) -> Iterator[_Running]:
        """Steps the core until nothing of this call is left; gives each request as it ends."""
        while by_id:
            outputs = self._core.step()
            for output in outputs.outputs if outputs is not None else ():
                request = by_id.get(output.id)
                if request is None:
                    continue  # a stop text ended it before this step landed
                assembler = request.assemblers[output.id]
                news = request.collector.add(assembler.push(output))
                request.output = news or request.output
                if assembler.finished:
                    del by_id[output.id]
                    if output.reason is None:  # a stop text ended it, the core does not know
                        self._core.abort([output.id])
                    if request.collector.finished:
                        yield request


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise InvalidRequest("lora_request: LoRA adapters are not built in.", "lora_request")


def _progress(items: Iterator[_Running], total: int, shown: bool) -> Iterator[_Running]:
    if not shown:
        yield from items
        return
    from rich.progress import track

    yield from track(items, description="Processed prompts", total=total, transient=True)
