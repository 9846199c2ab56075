"""`validate_messages`: a caller's chat messages, checked and brought into one form.

After it, each message has a known role and a text as content, so that every chat template can
take it. The rules:

- Text parts are joined by a newline, empty ones too; parts of other types are refused.
- Null or missing content of an assistant message is the empty text; of another it is refused.
- `tool_calls` null or empty is no call. Arguments may be an object or JSON text of one; a text
  that is no JSON object stays as it is, for a model may have written it.
- A refusal stands for the content if there is none.
- At most 4,096 messages, 4,096 parts a message, 128 tool calls a message.

Not for: the sense of a conversation, which is the template's affair. Next file: `text/chat.py`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection
from typing import Any, NoReturn

from octavo.errors import InvalidRequest

MAX_MESSAGES = 4096
MAX_PARTS = 4096
MAX_TOOL_CALLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")

_COMMON = frozenset({"role", "content", "name"})
_REASONING = ("reasoning", "reasoning_content")
# Answers come with these, and callers send whole answers back.
_ASSISTANT = frozenset({"tool_calls", "refusal", "annotations", "audio", "function_call"})
_KNOWN = dict.fromkeys(("system", "developer", "user"), _COMMON) | {
    "assistant": _COMMON | _ASSISTANT | frozenset(_REASONING),
    "tool": _COMMON | {"tool_call_id"},
}


def validate_messages(messages: object, *, lenient: bool = False) -> list[dict[str, Any]]:
    """New messages of one form; raises `InvalidRequest` naming the place, `messages[2].role`.

    `lenient` drops unknown fields in place of refusing them.
    """
    if not isinstance(messages, list) or not messages:
        _refuse("messages", "must be a list of at least one message")
    if len(messages) > MAX_MESSAGES:
        _refuse("messages", f"has {len(messages)} messages; at most {MAX_MESSAGES} are allowed")
    return [
        _message(message, f"messages[{place}]", lenient) for place, message in enumerate(messages)
    ]


def _message(message: object, at: str, lenient: bool) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(at, 'must be an object such as {"role": "user", "content": "Hi"}')
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        _refuse(f"{at}.role", f"is {_shown(role)}; use one of {', '.join(ROLES)}")
    if not lenient:
        _check_names(message, _KNOWN[role], at)
    made: dict[str, Any] = {"role": role, "content": _content(message, role, at)}
    if message.get("name") is not None:
        made["name"] = _text(message["name"], f"{at}.name")
    if role == "assistant":
        _add_assistant(message, made, at)
    if role == "tool":
        made["tool_call_id"] = _filled(message.get("tool_call_id"), f"{at}.tool_call_id")
    return made


def _content(message: dict[str, Any], role: str, at: str) -> str:
    content = message.get("content")
    if content is None and role == "assistant":
        refusal = message.get("refusal")
        return "" if refusal is None else _text(refusal, f"{at}.refusal")
    if content is None:
        _refuse(f"{at}.content", "is missing; only an assistant message may go without")
    if isinstance(content, str):
        return _text(content, f"{at}.content")
    if not isinstance(content, list) or not 1 <= len(content) <= MAX_PARTS:
        _refuse(f"{at}.content", f"must be a text, or a list of 1 to {MAX_PARTS} text parts")
    return "\n".join(_part(part, f"{at}.content[{place}]") for place, part in enumerate(content))


def _part(part: object, at: str) -> str:
    if not isinstance(part, dict):
        _refuse(at, 'must be an object such as {"type": "text", "text": "Hi"}')
    if part.get("type") != "text":
        kind = _shown(part["type"]) if "type" in part else "missing"
        _refuse(f"{at}.type", f'is {kind}; this model takes parts of type "text" only')
    return _text(part.get("text"), f"{at}.text")


def _add_assistant(message: dict[str, Any], made: dict[str, Any], at: str) -> None:
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            _refuse(f"{at}.{name}", "is not supported; leave it out")
    thought = [message[name] for name in _REASONING if message.get(name) is not None]
    if thought:  # templates use either name
        text = _text(thought[0], f"{at}.reasoning")
        made.update(dict.fromkeys(_REASONING, text))
    calls = message.get("tool_calls")
    if calls is None or calls == []:
        return
    if not isinstance(calls, list) or len(calls) > MAX_TOOL_CALLS:
        _refuse(f"{at}.tool_calls", f"must be a list of at most {MAX_TOOL_CALLS} calls")
    made["tool_calls"] = [
        _tool_call(call, f"{at}.tool_calls[{place}]") for place, call in enumerate(calls)
    ]


def _tool_call(call: object, at: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        _refuse(at, "must be an object with id, type and function")
    if call.get("type", "function") != "function":
        _refuse(f"{at}.type", f'is {_shown(call["type"])}; only "function" is known')
    function = call.get("function")
    if not isinstance(function, dict):
        _refuse(f"{at}.function", "must be an object with name and arguments")
    return {
        "id": _filled(call.get("id"), f"{at}.id"),
        "type": "function",
        "function": {
            "name": _filled(function.get("name"), f"{at}.function.name"),
            "arguments": _arguments(function.get("arguments"), f"{at}.function.arguments"),
        },
    }


def _arguments(value: object, at: str) -> dict[str, Any] | str:
    if value is None or value == "":
        return {}
    if isinstance(value, dict):
        return value
    text = _text(value, at)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return parsed if isinstance(parsed, dict) else text


def _text(value: object, at: str) -> str:
    if not isinstance(value, str):
        _refuse(at, f"is {_shown(value)}; it must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(at, f"has half a surrogate pair at character {error.start}; send whole characters")
    return value


def _filled(value: object, at: str) -> str:
    if value is None or value == "":
        _refuse(at, "is missing; it must be a text that is not empty")
    return _text(value, at)


def _check_names(message: dict[str, Any], known: Collection[str], at: str) -> None:
    for name in message:
        if name not in known:
            near = difflib.get_close_matches(str(name)[:80], known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            _refuse(f"{at}.{str(name)[:80]}", f"is not known for this role; {hint}")


def _shown(value: object) -> str:
    if value is None or isinstance(value, str):
        return json.dumps(value[:40] if value else value)
    return f"a value of type {type(value).__name__}"


def _refuse(at: str, what: str) -> NoReturn:
    raise InvalidRequest(f"{at} {what}.", param=at)
