"""Tools for a chat template that knows none: described in a system message, calls as text.

The description follows the form of Hermes, which `HermesParser` reads, and the calls and answers
of earlier turns are written the same way. A small model is no good at it unless a grammar forces
the call; it is still better than arguments for a function that the model has never seen.
Not for: templates that read `tools`. Next file: `choose.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from octavo.text.tools.declare import Tool

_HEAD = "You can call functions. They are described here, one a line, with JSON schemas:"
_TAIL = (
    "To call one, answer with its name and arguments as a JSON object between tags:\n"
    '<tool_call>\n{"name": "<name>", "arguments": {<arguments>}}\n</tool_call>'
)


def describe_tools(messages: list[dict[str, Any]], tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The conversation with the tools in its system message, and with all calls as text."""
    lines = (json.dumps(tool.shown["function"], ensure_ascii=False) for tool in tools)
    text = "\n".join((_HEAD, *lines, _TAIL))
    first = messages[0]
    if first["role"] in ("system", "developer"):
        text = f"{first['content']}\n\n{text}" if first["content"] else text
        messages = messages[1:]
        head = {**first, "content": text}
    else:
        head = {"role": "system", "content": text}
    return [head, *(_plain(message) for message in messages)]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = (
        json.dumps(
            {"name": call["function"]["name"], "arguments": call["function"]["arguments"]},
            ensure_ascii=False,
        )
        for call in calls
    )
    texts = [message["content"]] if message["content"] else []
    texts += [f"<tool_call>\n{text}\n</tool_call>" for text in written]
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(texts)}
