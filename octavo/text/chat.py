"""`ChatTemplate`: messages to a prompt, with the model's own Jinja template in a sandbox.

What a caller typed never becomes a control token: texts of special tokens in messages, tools or
arguments are put out of sight under a random name while the template runs, and come back as
plain text when the prompt is encoded. Not for: what a template may do (`sandbox.py`), the form of
messages (`messages.py`), or parsing what the model answers. Next file: `reasoning.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jinja2

from octavo.errors import ConfigError, InvalidRequest
from octavo.text.messages import validate_messages
from octavo.text.sandbox import BUDGET, MAX_TEXTS, Budget, RefusedError, Sandbox
from octavo.text.tokenizer import THREAD_FROM, Tokenizer

__all__ = ["ChatTemplate", "RenderedPrompt", "validate_messages"]

_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", BUDGET})
PROBE_SECONDS = 0.1  # of processor time
_PROBE = "octavoprobe"  # what a template is tried with


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as text. `hidden` are what placeholders in `guarded` stand for, by number."""

    text: str
    guarded: str
    hidden: tuple[str, ...]
    placeholder: re.Pattern[str]

    def restore(self, text: str) -> str:
        """`text` with placeholders replaced by what they stand for."""
        return self.placeholder.sub(lambda match: self.hidden[int(match.group(1))], text)


class ChatTemplate:
    """A compiled template. Raises `ConfigError` naming file and line if it does not compile."""

    def __init__(
        self, source: str | None, tokenizer: Tokenizer, *, name: str = "chat template"
    ) -> None:
        """`source` None is a model without a template: every `render` is refused."""
        self.name = name
        self.source = source or ""
        self._tokenizer = tokenizer
        self._template: jinja2.Template | None = None
        self.variables: frozenset[str] = frozenset()
        if source is None:
            return
        sandbox = Sandbox()
        try:
            self._template, self.variables = sandbox.compiled(source, name)
        except jinja2.TemplateSyntaxError as error:
            found = "; ".join(sandbox.faults(source, error))
            raise ConfigError(f"The chat template {name}, {found}.", "chat_template") from None
        except RecursionError:
            raise ConfigError(
                f"The chat template {name} is nested too deeply.", "chat_template"
            ) from None
        self._knows_developer = "developer" in source
        # Two things that templates disagree about are found out by trying them.
        self._list_content = not self._shows_text() and self._shows_parts()
        self._text_arguments = not self._shows_call({"k": _PROBE}) and self._shows_call(
            json.dumps({"k": _PROBE})
        )

    @property
    def takes_tools(self) -> bool:
        """True if the template reads `tools`."""
        return "tools" in self.variables

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedPrompt:
        """The prompt of messages that `validate_messages` made.

        `continue_final_message` leaves the last message open, for the model to go on with it.
        Raises `InvalidRequest` with the template's own words where it refuses.
        """
        self._check(add_generation_prompt, continue_final_message, tools, kwargs or {})
        guard = _Guard(self._tokenizer)
        try:
            shown = [guard.hide(self._role(message)) for message in messages]
            if continue_final_message:
                shown[-1]["content"] += guard.end
            for message in shown:
                self._fit(message)
            text = self._run(
                {
                    **self._tokenizer.named,
                    **{name: guard.hide(value) for name, value in (kwargs or {}).items()},
                    "messages": shown,
                    "tools": guard.hide(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except RecursionError:
            raise InvalidRequest("The messages are nested too deeply.", "messages") from None
        if continue_final_message:
            text, found, _ = text.rpartition(guard.end)
            if not found:
                raise InvalidRequest(
                    "continue_final_message = true is not possible: the chat template does not "
                    "show the last message as it is.",
                    "continue_final_message",
                )
        return guard.rendered(text)

    def encode(self, rendered: RenderedPrompt, tokenizer: Tokenizer | None = None) -> list[int]:
        """Token ids; only what the template itself wrote gives control tokens.

        No start token is added: templates write their own.
        """
        tokenizer = tokenizer or self._tokenizer
        if not rendered.hidden:
            return tokenizer.encode(rendered.text, add_special_tokens=False)
        return tokenizer.encode_guarded(rendered.guarded, rendered.restore)

    async def encode_async(
        self, rendered: RenderedPrompt, tokenizer: Tokenizer | None = None
    ) -> list[int]:
        """As `encode`; a long prompt does not hold up the event loop."""
        if len(rendered.text) < THREAD_FROM:
            return self.encode(rendered, tokenizer)
        return await asyncio.to_thread(self.encode, rendered, tokenizer)

    def _check(
        self,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> None:
        if self._template is None:
            raise InvalidRequest(
                f"The model {self.name} has no chat template: send a completion request, or "
                "start the server with --chat-template FILE.",
                "messages",
            )
        if add_generation_prompt and continue_final_message:
            raise InvalidRequest(
                "continue_final_message = true does not go with add_generation_prompt = true: "
                "set one of them to false.",
                "continue_final_message",
            )
        if tools and not self.takes_tools:
            raise InvalidRequest(
                "tools are not supported by the chat template of this model: leave them out.",
                "tools",
            )
        readable = self.variables - _GIVEN - self._tokenizer.named.keys()
        for name in kwargs:
            if name not in readable:
                raise InvalidRequest(
                    f"chat_template_kwargs.{str(name)[:80]} is not read by the chat template of "
                    "this model: leave it out.",
                    "chat_template_kwargs",
                )

    def _role(self, message: dict[str, Any]) -> dict[str, Any]:
        """Developer messages are system messages to templates that know no developer."""
        if message["role"] == "developer" and not self._knows_developer:
            return {**message, "role": "system"}
        return message

    def _fit(self, message: dict[str, Any]) -> None:
        """Gives content and arguments the form that this template takes."""
        if self._list_content:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for call in message.get("tool_calls", ()) if self._text_arguments else ():
            function = call["function"]
            if not isinstance(function["arguments"], str):
                function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)

    def _shows_text(self) -> bool:
        return _PROBE in self._try({"role": "user", "content": _PROBE})

    def _shows_parts(self) -> bool:
        parts = [{"type": "text", "text": _PROBE}]
        return _PROBE in self._try({"role": "user", "content": parts})

    def _shows_call(self, arguments: object) -> bool:
        """True if arguments in this form are shown, and not in the way in which Python would."""
        function = {"name": "f", "arguments": arguments}
        call = {"id": "abcdef123", "type": "function", "function": function}
        asked = {"role": "user", "content": "Hi"}
        made: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        if self._list_content:
            asked["content"] = made["content"] = [{"type": "text", "text": "Hi"}]  # type: ignore[assignment]
        shown = self._try(asked, made)
        return _PROBE in shown and "'k'" not in shown

    def _try(self, *messages: dict[str, Any]) -> str:
        """What the template makes of messages; nothing if it refuses them."""
        values = {"messages": list(messages), "tools": None, "add_generation_prompt": False}
        try:
            return self._run({**self._tokenizer.named, **values}, PROBE_SECONDS)
        except (InvalidRequest, RecursionError):
            return ""

    def _run(self, values: dict[str, Any], seconds: float | None = None) -> str:
        assert self._template is not None
        try:
            return _written(self._template, {**values, BUDGET: Budget(seconds)})
        except RefusedError as error:
            raise InvalidRequest(str(error), "messages") from None
        except RecursionError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            reason = str(error).rstrip(".") or type(error).__name__
            raise InvalidRequest(
                f"The chat template of this model cannot take these messages: {reason}.", "messages"
            ) from None


def _written(template: jinja2.Template, values: dict[str, Any]) -> str:
    """All that a template writes, as long as it is not too much."""
    parts, size = [], 0
    for part in template.generate(values):
        size += len(part)
        if size > MAX_TEXTS:
            raise RefusedError(f"The chat template wrote more than {MAX_TEXTS} characters.")
        parts.append(part)
    return "".join(parts)


class _Guard:
    """Puts texts of special tokens out of sight, under names that nobody can guess."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._nonce = secrets.token_hex(16)
        self._hidden: list[str] = []
        self.end = f"e{self._nonce}e"

    def hide(self, value: Any) -> Any:
        """A copy of the value in which no text holds the text of a special token."""
        if isinstance(value, str):
            return self._tokenizer.replace_special(value, self._hide_one)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [self.hide(entry) for entry in value]
        return value

    def _hide_one(self, text: str) -> str:
        self._hidden.append(text)
        return f"x{self._nonce}x{len(self._hidden) - 1}x"

    def rendered(self, text: str) -> RenderedPrompt:
        # In any case of letters, for a template may write in capitals.
        placeholder = re.compile(f"x{self._nonce}x([0-9]+)x", re.IGNORECASE)
        prompt = RenderedPrompt(text, text, tuple(self._hidden), placeholder)
        if not self._hidden:
            return prompt
        return RenderedPrompt(prompt.restore(text), text, prompt.hidden, placeholder)
