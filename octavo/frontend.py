"""Frontend: what the text side of an engine needs of a model, opened without touching torch.

Finds the checkpoint (pulling it where that is allowed), loads tokenizer and chat template, and
turns options into the records that core and worker get. Shared by server, `LLM` and
`AsyncLLMEngine`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from octavo.checkpoint.records import Checkpoint
from octavo.config import SchedulerConfig, WorkerConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.grammar.vocabulary import vocabulary_of
from octavo.options import EngineArgs
from octavo.prompts import EncodedPrompt
from octavo.pulling import locate, open_named
from octavo.resolve import planned_scheduler, worker_config
from octavo.sampling_params import SamplingParams
from octavo.text.chat import ChatTemplate, validate_messages
from octavo.text.tokenizer import Tokenizer

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class Frontend:
    """An opened model, as seen from the side of text."""

    checkpoint: Checkpoint
    longest: int | None  # context that the model was made for, in tokens
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    sampling_defaults: dict[str, Any]
    worker: WorkerConfig
    scheduler: SchedulerConfig

    @classmethod
    def open(
        cls, args: EngineArgs, *, chat_template: str | None = None, offline: bool = False
    ) -> Frontend:
        """Raises ConfigError or CheckpointError before any weight is read.

        `offline` is for work where no client waits for a first token.
        """
        args.check()
        checkpoint = locate(args)
        tokenizer = _tokenizer(args, checkpoint)
        config = {**checkpoint.config, **args.hf_overrides}
        longest = config.get("max_position_embeddings")
        worker = worker_config(args, str(checkpoint.path), model_max_len=longest, offline=offline)
        return cls(
            checkpoint=checkpoint,
            longest=longest,
            tokenizer=tokenizer,
            chat_template=_template(chat_template, checkpoint, tokenizer),
            sampling_defaults=_sampling_defaults(args, checkpoint),
            worker=replace(worker, vocabulary=vocabulary_of(tokenizer)),
            scheduler=planned_scheduler(args, worker, offline=offline),
        )

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
    ) -> EncodedPrompt:
        """Messages to token ids. Raises InvalidRequest if there is no template to do it with."""
        chosen = self.chat_template
        if template is not None:
            chosen = _template(template, self.checkpoint, self.tokenizer)
        if chosen is None:
            raise InvalidRequest(
                "This model has no chat template; give one with --chat-template, or send a "
                "completion request.",
                "messages",
            )
        rendered = chosen.render(
            validate_messages(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            kwargs=kwargs,
        )
        return EncodedPrompt(chosen.encode(rendered, self.tokenizer), rendered.text)


def _tokenizer(args: EngineArgs, checkpoint: Checkpoint) -> Tokenizer:
    if args.tokenizer is None:
        return Tokenizer.from_checkpoint(checkpoint)
    other = open_named(args.tokenizer, args, revision=args.tokenizer_revision)
    return Tokenizer.from_checkpoint(other)


def _template(
    wanted: str | None, checkpoint: Checkpoint, tokenizer: Tokenizer
) -> ChatTemplate | None:
    """The template that a person named (a file or the text itself), or the model's own."""
    if wanted is None:
        if checkpoint.chat_template is None:
            return None
        return ChatTemplate(checkpoint.chat_template, tokenizer, name=str(checkpoint.path))
    if "{" in wanted:
        return ChatTemplate(wanted, tokenizer, name="--chat-template")
    try:
        source = Path(wanted).read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--chat-template {wanted}: {error}.", "chat_template") from None
    return ChatTemplate(source, tokenizer, name=wanted)


def _sampling_defaults(args: EngineArgs, checkpoint: Checkpoint) -> dict[str, Any]:
    """Sampling defaults of the model (`--generation-config`), with the operator's laid over."""
    if args.generation_config == "vllm":
        found: dict[str, Any] = {}
    elif args.generation_config == "auto":
        found = checkpoint.generation
    else:
        found = open_named(args.generation_config, args).generation
    for name in args.override_generation_config:
        if name not in SAMPLING_DEFAULTS:
            raise ConfigError(
                f"--override-generation-config: {name} cannot be set there; "
                f"use {', '.join(SAMPLING_DEFAULTS)}.",
                "override_generation_config",
            )
    merged = {**found, **args.override_generation_config}
    defaults = {name: merged[name] for name in SAMPLING_DEFAULTS if merged.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except InvalidRequest as error:
        raise ConfigError(f"sampling defaults of the model: {error.message}") from None
    return defaults
