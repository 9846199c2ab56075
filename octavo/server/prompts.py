"""What a request asks to be continued, as token ids within the context length.

Texts that cannot fit are refused by their length before they are encoded; long ones are encoded
in a thread. Not for: sampling (`generation.py`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from octavo.errors import ConfigError, InvalidRequest
from octavo.prompts import check_length
from octavo.server.body import unhurried
from octavo.server.context import Serving
from octavo.server.reading import Plan
from octavo.server.schema import ChatRequest, CompletionRequest, Generation, TokenizeRequest
from octavo.text.chat import ChatTemplate, validate_messages
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.fallback import describe_tools

THREAD_FROM = 32 * 1024  # characters of messages that are checked and rendered in a thread
ANSWER_ROOM = 1024  # tokens that truncation leaves for an answer of no stated length, at most
MAX_TEMPLATE = 2**15  # characters of one that comes with a request
PART_SIZE = 64  # what a message or a part of one counts as, in characters


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and the text that they came from where there is one."""

    ids: list[int]
    text: str | None = None
    continued: str | None = None  # the message that the answer goes on with


async def completion_prompts(serving: Serving, request: CompletionRequest) -> list[Prompt]:
    """All prompts of a completion request, each truncated if asked for. Raises InvalidRequest."""
    choices = max(1, request.n or 1)
    parts = split_prompts(request.prompt, serving.settings.max_sequences // choices)
    special = request.add_special_tokens is not False
    prompts: list[Prompt] = []
    for part in parts:
        if isinstance(part, str):
            if request.truncate_prompt_tokens is None:
                _refuse_hopeless(serving, serving.engine.tokenizer.at_least(part), "prompt")
            ids = await serving.engine.tokenizer.encode_async(part, special)
            left = truncate(serving, ids, request, request.max_tokens)
            prompts.append(Prompt(left, part if len(left) == len(ids) else None))
        else:
            limit = serving.engine.limits
            if request.truncate_prompt_tokens is None and len(part) > limit.max_model_len:
                check_length(len(part), limit.max_model_len, request.max_tokens)
            ids = checked_ids(part, limit.vocab_size, "prompt")
            prompts.append(Prompt(truncate(serving, ids, request, request.max_tokens)))
    return prompts


def split_prompts(prompt: str | list[Any], most: int) -> list[str | list[Any]]:
    """One entry a prompt, `most` at most: texts stay texts, ids stay lists. Raises InvalidRequest.

    Their number is checked before any of them is looked at.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequest("prompt is an empty list; send at least one token or text.", "prompt")
    first = prompt[0]
    if isinstance(first, (str, list)) and len(prompt) > most:
        raise InvalidRequest(
            f"prompt holds {len(prompt)} prompts; at most {most} with this n go in one request.",
            "prompt",
        )
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if isinstance(first, list):
        if not all(isinstance(item, list) for item in prompt):
            raise InvalidRequest("prompt mixes lists with other values.", "prompt")
        return list(prompt)
    return [prompt]


def checked_ids(ids: list[Any], vocab_size: int, name: str) -> list[int]:
    """Token ids within the vocabulary. Raises InvalidRequest for the first that is not one."""
    for place, token in enumerate(ids):
        if type(token) is not int:
            raise InvalidRequest(
                f"{name}[{place}] is not a token id; send whole numbers, or texts only.", name
            )
        if not 0 <= token < vocab_size:
            raise InvalidRequest(
                f"{name}[{place}] = {str(token)[:40]} is outside the vocabulary; token ids of "
                f"this model are 0 to {vocab_size - 1}.",
                name,
            )
    return ids


async def chat_prompt(
    serving: Serving,
    request: ChatRequest | TokenizeRequest,
    template: ChatTemplate,
    plan: Plan,
) -> Prompt:
    """The rendered conversation of a request, with its tools. Raises InvalidRequest."""
    large = _size(request.messages or []) >= THREAD_FROM
    lenient = not serving.settings.strict_fields
    messages = await unhurried(
        partial(validate_messages, request.messages, lenient=lenient), large=large
    )
    if isinstance(request, TokenizeRequest) or request.truncate_prompt_tokens is None:
        at_least = serving.engine.tokenizer.at_least
        least = sum(at_least(message["content"]) for message in messages)
        _refuse_hopeless(serving, least, "messages")
    if plan.describes:
        messages = describe_tools(messages, plan.tools)
    arguments = dict(serving.settings.default_chat_template_kwargs)
    if isinstance(request, ChatRequest) and request.reasoning_effort is not None:
        if "reasoning_effort" not in template.variables:
            raise InvalidRequest(
                "reasoning_effort is not read by the chat template of this model; leave it out.",
                "reasoning_effort",
            )
        arguments["reasoning_effort"] = request.reasoning_effort
    arguments.update(request.chat_template_kwargs or {})
    continues = request.continue_final_message is True
    opens = request.add_generation_prompt
    opens = not continues if opens is None else opens

    render = partial(
        _render,
        template,
        serving.engine.tokenizer,
        messages,
        arguments=arguments,
        tools=None if plan.describes else [tool.shown for tool in plan.tools],
        opens=opens,
        continues=continues,
    )
    return await unhurried(render, large=large or request.chat_template is not None)


def _size(messages: list[dict[str, Any]]) -> int:
    """About how much work messages are that nobody has checked yet, in characters."""
    size = PART_SIZE * len(messages)
    for message in messages[: THREAD_FROM // PART_SIZE]:
        content = message.get("content")
        if isinstance(content, str):
            size += len(content)
        elif isinstance(content, list):
            size += PART_SIZE * len(content) + sum(
                len(text)
                for part in content[: THREAD_FROM // PART_SIZE]
                if isinstance(part, dict) and isinstance(text := part.get("text"), str)
            )
    return size


async def chosen_template(serving: Serving, wanted: str | None) -> ChatTemplate:
    """The model's template, or the caller's where the operator trusts callers."""
    if wanted is not None:
        if not serving.settings.trust_request_chat_template:
            raise InvalidRequest(
                "chat_template: templates of callers are off; the operator can allow them with "
                "--trust-request-chat-template.",
                "chat_template",
            )
        if len(wanted) > MAX_TEMPLATE:
            raise InvalidRequest(
                f"chat_template has {len(wanted)} characters; send at most {MAX_TEMPLATE}.",
                "chat_template",
            )
        make = partial(ChatTemplate, wanted, serving.engine.tokenizer, name="of this request")
        try:
            return await asyncio.to_thread(make)
        except ConfigError as error:
            raise InvalidRequest(error.message, "chat_template") from None
    template = serving.engine.chat_template
    if template is None:
        raise InvalidRequest(
            "This model has no chat template; use /v1/completions, or start the server with "
            "--chat-template.",
            "messages",
        )
    return template


def truncate(
    serving: Serving, ids: list[int], request: Generation, max_tokens: int | None
) -> list[int]:
    """The part of a prompt that `truncate_prompt_tokens` leaves; the end, unless told otherwise."""
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return ids
    longest = serving.engine.limits.max_model_len
    if wanted < -1 or wanted == 0 or wanted > longest:
        raise InvalidRequest(
            f"truncate_prompt_tokens = {str(wanted)[:40]} must be 1 to {longest}, or -1.",
            "truncate_prompt_tokens",
        )
    if wanted == -1:
        room = min(ANSWER_ROOM, longest // 4) if max_tokens is None else max(1, max_tokens)
        wanted = max(1, longest - room)
    return ids[:wanted] if request.truncation_side == "right" else ids[-wanted:]


def _render(
    template: ChatTemplate,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    *,
    arguments: dict[str, object],
    tools: list[dict[str, Any]] | None,
    opens: bool,
    continues: bool,
) -> Prompt:
    rendered = template.render(
        messages,
        add_generation_prompt=opens,
        continue_final_message=continues,
        tools=tools,
        kwargs=arguments,
    )
    continued = messages[-1]["content"] if continues else None
    return Prompt(template.encode(rendered, tokenizer), rendered.text, continued)


def _refuse_hopeless(serving: Serving, least: int, name: str) -> None:
    longest = serving.engine.limits.max_model_len
    if least > longest:
        raise InvalidRequest(
            f"This model's maximum context length is {longest} tokens. However, you requested at "
            f"least {least} tokens in the prompt. Shorten the prompt.",
            name,
        )
