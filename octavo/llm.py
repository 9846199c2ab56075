"""LLM: the engine in this process, for scripts. The same core as the server's, without sockets.

Not for: serving several callers at once (`async_engine.py`, `octavo serve`).
Next file: `llm_engine.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, cast

import msgspec

from octavo.errors import InvalidRequest
from octavo.foreign import LLM_ABSENT, absent_method, refuse_kwargs, refuse_lora
from octavo.llm_engine import LLMEngine
from octavo.obs.reader import Metric
from octavo.options import EngineArgs
from octavo.outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput
from octavo.pooling import PoolingParams, vector_of
from octavo.prompts import EncodedPrompt, PromptType, encode_prompt, is_single
from octavo.sampling_params import RequestOutputKind, SamplingParams
from octavo.types import WorkerInfo

Message: TypeAlias = dict[str, Any]
Params: TypeAlias = SamplingParams | Sequence[SamplingParams] | None


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
        self.llm_engine = LLMEngine(args, chat_template=chat_template)
        self._numbers = itertools.count()
        self._queued: list[str] = []  # by enqueue, not yet waited for
        self._done: dict[str, RequestOutput] = {}  # ended before anybody waited for them

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, which says what to do instead of a method that others have."""
        raise absent_method("LLM", name, LLM_ABSENT)

    @property
    def info(self) -> WorkerInfo:
        """What was loaded, and what it took."""
        return self.llm_engine.info

    def get_tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Defaults of the model's generation_config.json over those of SamplingParams."""
        return SamplingParams(**self.llm_engine.frontend.sampling_defaults)

    def get_metrics(self) -> list[Metric]:
        """A picture of all metrics, under the names of the server's route /metrics."""
        return self.llm_engine.get_metrics()

    def reset_prefix_cache(self) -> bool:
        """Forgets all cached prefixes; blocks in use stay with their sequences."""
        return self.llm_engine.reset_prefix_cache()

    def shutdown(self) -> None:
        """Frees the model; the object cannot be used afterwards."""
        self.llm_engine.shutdown()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; the outputs are in the order of the prompts.

        A prompt is a text, a list of token ids, a TextPrompt or a TokensPrompt. One
        SamplingParams serves for all prompts, a list has one each. A callable `use_tqdm` is taken
        for true.
        """
        encoded = self._encode(prompts, lora_request, tokenization_kwargs, mm_processor_kwargs)
        return self._finish(self._add(encoded, sampling_params, priority), bool(use_tqdm))

    def chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: Params = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        priority: list[int] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or each of a list of conversations.

        `template` are the keywords of `enqueue_chat`.
        """
        encoded = self._encode_chats(messages, lora_request, **template)
        return self._finish(self._add(encoded, sampling_params, priority), bool(use_tqdm))

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | Callable[..., Any] = True,
        lora_request: None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """The vector of each prompt, in order. A prompt leaves room for one token."""
        wanted = pooling_params or PoolingParams()
        params = SamplingParams(max_tokens=1, temperature=0, pooling=wanted.pooling)
        encoded = self._encode(prompts, lora_request, tokenization_kwargs, None)
        return [
            EmbeddingRequestOutput(
                output.request_id,
                EmbeddingOutput(
                    vector_of(output.outputs[0].pooled, normalize=wanted.normalize).tolist()
                ),
                output.prompt_token_ids or [],
                num_cached_tokens=output.num_cached_tokens,
            )
            for output in self._finish(self._add(encoded, params, None), bool(use_tqdm))
        ]

    def enqueue(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: Params = None,
        *,
        lora_request: None = None,
        priority: list[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """As `generate`, but only queues; the ids of the requests. They run when waited for."""
        encoded = self._encode(prompts, lora_request, tokenization_kwargs, mm_processor_kwargs)
        ids = self._add(encoded, sampling_params, priority)
        self._queued += ids
        return ids

    def enqueue_chat(
        self,
        messages: list[Message] | Sequence[list[Message]],
        sampling_params: Params = None,
        *,
        lora_request: None = None,
        priority: list[int] | None = None,
        **template: Any,
    ) -> list[str]:
        """As `chat`, but only queues; the ids of the requests. They run when waited for.

        `template`: chat_template, chat_template_content_format ("auto" alone),
        add_generation_prompt, continue_final_message, tools, chat_template_kwargs.
        """
        encoded = self._encode_chats(messages, lora_request, **template)
        ids = self._add(encoded, sampling_params, priority)
        self._queued += ids
        return ids

    def wait_for_completion(
        self, *, use_tqdm: bool | Callable[..., Any] = True
    ) -> list[RequestOutput]:
        """Runs what `enqueue` has queued; the outputs in the order in which it was queued."""
        ids, self._queued = self._queued, []
        return self._finish(ids, bool(use_tqdm))

    def _encode(
        self,
        prompts: PromptType | Sequence[PromptType],
        lora_request: object,
        tokenization_kwargs: dict[str, Any] | None,
        mm_processor_kwargs: dict[str, Any] | None,
    ) -> list[EncodedPrompt]:
        refuse_lora(lora_request)
        refuse_kwargs(
            tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        single = is_single(prompts)
        every = [cast(PromptType, prompts)] if single else list(cast(Sequence[PromptType], prompts))
        tokenizer = self.llm_engine.frontend.tokenizer
        return [encode_prompt(prompt, tokenizer) for prompt in every]

    def _encode_chats(
        self,
        messages: list[Message] | Sequence[list[Message]],
        lora_request: object,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[EncodedPrompt]:
        refuse_lora(lora_request)
        refuse_kwargs(
            tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs
        )
        if chat_template_content_format != "auto":
            raise InvalidRequest(
                f"chat_template_content_format = {chat_template_content_format!r}: how parts reach "
                "the template is read off the template; use 'auto'.",
                "chat_template_content_format",
            )
        if not messages:
            raise InvalidRequest("messages is empty; send at least one message.", "messages")
        conversations = [messages] if isinstance(messages[0], dict) else messages
        return [
            self.llm_engine.frontend.encode_chat(
                list(cast(list[Message], conversation)),
                template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                kwargs=chat_template_kwargs or {},
            )
            for conversation in conversations
        ]

    def _add(
        self, prompts: list[EncodedPrompt], params: Params, priority: list[int] | None
    ) -> list[str]:
        """Queues all prompts, or none if one of them cannot be served; their ids."""
        every = self._params(params, len(prompts))
        priorities = priority or [0] * len(prompts)
        if len(priorities) != len(prompts):
            raise InvalidRequest(
                f"priority has {len(priorities)} values for {len(prompts)} prompts.", "priority"
            )
        for prompt, own in zip(prompts, every, strict=True):
            self.llm_engine.check(prompt, own)
        ids: list[str] = []
        try:
            for prompt, own, rank in zip(prompts, every, priorities, strict=True):
                number = str(next(self._numbers))
                ids.append(self.llm_engine.add_request(number, prompt, own, priority=rank))
        except BaseException:
            self.llm_engine.abort_request(ids)
            raise
        return ids

    def _params(self, params: Params, count: int) -> list[SamplingParams]:
        """One record a prompt; what a call gives is the last output alone."""
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            every = [_final_only(params)] * count
        else:
            every = [_final_only(one) for one in params]
        if len(every) != count:
            raise InvalidRequest(
                f"sampling_params has {len(every)} records for {count} prompts.",
                "sampling_params",
            )
        return every

    def _finish(self, ids: list[str], progress: bool) -> list[RequestOutput]:
        """Steps the engine until these requests have ended; their outputs in order."""
        found: dict[str, RequestOutput] = {}
        try:
            for output in _progress(self._ended(set(ids)), len(ids), progress):
                found[output.request_id] = output
        finally:
            self.llm_engine.abort_request(ids)
        return [found[request_id] for request_id in ids]

    def _ended(self, wanted: set[str]) -> Iterator[RequestOutput]:
        """The outputs of `wanted` as they end; others that end meanwhile are kept."""
        for request_id in wanted & self._done.keys():
            wanted.remove(request_id)
            yield self._done.pop(request_id)
        while wanted:
            for output in self.llm_engine.step():
                if output.request_id in wanted:
                    wanted.remove(output.request_id)
                    yield output
                else:
                    self._done[output.request_id] = output


def _final_only(params: SamplingParams) -> SamplingParams:
    """What a call returns is each request's last output, whatever kind the record asks for."""
    return msgspec.structs.replace(params, output_kind=RequestOutputKind.FINAL_ONLY)


def _progress(items: Iterator[RequestOutput], total: int, shown: bool) -> Iterator[RequestOutput]:
    if not shown:
        yield from items
        return
    from rich.progress import track

    yield from track(items, description="Processed prompts", total=total, transient=True)
