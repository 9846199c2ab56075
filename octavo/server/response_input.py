"""A request of /v1/responses as the chat request that means the same.

Items become messages: a call joins the assistant's message before it, reasoning the one after it.
What a response could have and a chat has not is refused by name. Not for: answers
(`responses.py`, the next file).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NoReturn

import msgspec

from octavo.errors import InvalidRequest
from octavo.server.schema import ChatRequest, ResponsesRequest

_TEXTS = ("input_text", "output_text", "text")
_MESSAGE = frozenset({"type", "role", "content", "id", "status", "phase", "name"})
_CALL = frozenset({"type", "call_id", "name", "arguments", "id", "status"})
_RESULT = frozenset({"type", "call_id", "output", "id", "status"})
_REASONING = frozenset({"type", "id", "summary", "content", "encrypted_content", "status"})
_INCLUDED = ("message.output_text.logprobs", "reasoning.encrypted_content")

# Fields that a chat request has under the same name.
_SHARED = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__
    and name not in ("tools", "tool_choice", "stream_options", "top_logprobs")
)
# Our names of settings, and where a caller of this route finds them.
NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "structured_outputs.structural_tag": "tools",
    "structured_outputs.json": "text.format.schema",
    "structured_outputs": "text.format",
    "messages": "input",
}


def chat_request(body: ResponsesRequest) -> ChatRequest:
    """The chat request. Raises InvalidRequest that names the place in the body."""
    given = {name: value for name in _SHARED if (value := _value(body, name)) is not None}
    messages = _messages(body.input)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
    logprobs = _wants_logprobs(body)
    if body.top_logprobs and not logprobs:
        _refuse("top_logprobs", f"goes with include: [{_INCLUDED[0]!r}] only")
    effort = _effort(body.reasoning)
    return ChatRequest(
        messages=messages,
        max_completion_tokens=body.max_output_tokens,
        tools=None if body.tools is None else [_tool(t, i) for i, t in enumerate(body.tools)],
        tool_choice=_tool_choice(body.tool_choice),
        response_format=_response_format(body.text),
        reasoning_effort=effort,
        logprobs=logprobs or None,
        top_logprobs=body.top_logprobs if logprobs else None,
        **given,
    )


def _value(body: ResponsesRequest, name: str) -> Any:
    return msgspec.structs.asdict(body)[name]


def _messages(items: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not items:
        _refuse("input", "is an empty list; send at least one message")
    messages: list[dict[str, Any]] = []
    thought: str | None = None
    for place, item in enumerate(items):
        at = f"input[{place}]"
        kind = item.get("type", "message")
        if kind == "message":
            messages.append(_message(item, at, thought))
        elif kind == "function_call":
            if thought is not None or not messages or messages[-1]["role"] != "assistant":
                messages.append(_assistant(None, thought))
            messages[-1].setdefault("tool_calls", []).append(_call(item, at))
        elif kind == "function_call_output":
            messages.append(_result(item, at))
        elif kind == "reasoning":
            thought = _thought(item, at)
            continue
        else:
            known = "message, function_call, function_call_output and reasoning"
            _refuse(f"{at}.type", f"is {str(kind)[:40]!r}; known are {known}")
        thought = None
    return messages or [_assistant("", thought)]


def _assistant(content: str | None, thought: str | None) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": content}
    return made if thought is None else {**made, "reasoning": thought}


def _message(item: dict[str, Any], at: str, thought: str | None) -> dict[str, Any]:
    _known(item, _MESSAGE, at)
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        _refuse(f"{at}.role", f"is {str(role)[:40]!r}; use user, assistant, system or developer")
    content = _content(item.get("content"), f"{at}.content")
    if role == "assistant":
        return _assistant(content, thought)
    return {"role": role, "content": content}


def _content(content: object, at: str) -> str:
    """Text, or parts that are joined by line breaks as those of a chat are."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        _refuse(at, "must be a text or a list of parts")
    texts = []
    for place, part in enumerate(content):
        where = f"{at}[{place}]"
        if not isinstance(part, dict):
            _refuse(where, 'must be an object such as {"type": "input_text", "text": "Hi"}')
        kind = part.get("type")
        text = part.get("refusal") if kind == "refusal" else part.get("text")
        if kind not in (*_TEXTS, "refusal"):
            _refuse(f"{where}.type", f"is {str(kind)[:40]!r}; this model takes text only")
        if not isinstance(text, str):
            _refuse(f"{where}.text", "must be a text")
        texts.append(text)
    return "\n".join(texts)


def _call(item: dict[str, Any], at: str) -> dict[str, Any]:
    _known(item, _CALL, at)
    function = {
        "name": _filled(item, "name", at),
        "arguments": item.get("arguments") or "{}",
    }
    if not isinstance(function["arguments"], str):
        _refuse(f"{at}.arguments", "must be a text of JSON")
    return {"id": _filled(item, "call_id", at), "type": "function", "function": function}


def _result(item: dict[str, Any], at: str) -> dict[str, Any]:
    _known(item, _RESULT, at)
    call = _filled(item, "call_id", at)
    return {
        "role": "tool",
        "tool_call_id": call,
        "content": _content(item.get("output"), f"{at}.output"),
    }


def _thought(item: dict[str, Any], at: str) -> str:
    """The reasoning of an earlier answer; summaries stand in for it if that is all there is."""
    _known(item, _REASONING, at)
    for name in ("content", "summary"):
        parts = item.get(name) or []
        if not isinstance(parts, list):
            _refuse(f"{at}.{name}", "must be a list of parts")
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        if texts and all(isinstance(text, str) for text in texts):
            return "\n".join(str(text) for text in texts)
    return ""


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    at = f"tools[{place}]"
    if tool.get("type", "function") != "function":
        _refuse(f"{at}.type", f'is {str(tool.get("type"))[:40]!r}; only "function" is known')
    return {
        "type": "function",
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def _tool_choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") != "function":
        _refuse("tool_choice.type", f'is {str(choice.get("type"))[:40]!r}; use "function"')
    _known(choice, {"type", "name"}, "tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _response_format(text: dict[str, Any] | None) -> dict[str, Any] | None:
    if text is None:
        return None
    _known(text, {"format", "verbosity"}, "text")
    if text.get("verbosity") not in (None, "medium"):
        _refuse("text.verbosity", "is not supported; ask for a short or long answer in the input")
    wanted = text.get("format")
    if wanted is None:
        return None
    if not isinstance(wanted, dict):
        _refuse("text.format", "must be an object with type")
    if wanted.get("type") == "json_schema":
        _known(wanted, {"type", "name", "schema", "strict", "description"}, "text.format")
        rest = {name: value for name, value in wanted.items() if name != "type"}
        return {"type": "json_schema", "json_schema": rest}
    if wanted.get("type") not in ("text", "json_object"):
        known = "text, json_object and json_schema"
        _refuse("text.format.type", f"is {str(wanted.get('type'))[:40]!r}; known are {known}")
    return wanted


def _wants_logprobs(body: ResponsesRequest) -> bool:
    for name in body.include or ():
        if name not in _INCLUDED:
            _refuse("include", f"holds {name[:60]!r}; known are {', '.join(_INCLUDED)}")
    return _INCLUDED[0] in (body.include or ())


def _effort(reasoning: dict[str, Any] | None) -> str | None:
    if reasoning is None:
        return None
    _known(reasoning, {"effort", "summary", "generate_summary"}, "reasoning")
    for name in ("summary", "generate_summary"):
        if reasoning.get(name) is not None:
            _refuse(
                f"reasoning.{name}",
                "is not supported: reasoning is given whole, not summarized; leave it out",
            )
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        _refuse("reasoning.effort", "must be a text")
    return effort


def _filled(item: Mapping[str, Any], name: str, at: str) -> str:
    value = item.get(name)
    if not isinstance(value, str) or not value:
        _refuse(f"{at}.{name}", "is missing; it must be a text that is not empty")
    return value


def _known(item: Mapping[str, Any], names: Collection[str], at: str) -> None:
    for name in item:
        if name not in names:
            _refuse(f"{at}.{str(name)[:60]}", f"is not known; known are {', '.join(sorted(names))}")


def _refuse(at: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{at} {what}.", at)
