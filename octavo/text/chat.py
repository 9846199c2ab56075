"""`ChatTemplate`: messages to a prompt, with the model's own Jinja template in a sandbox.

What a caller typed never becomes a control token: texts of special tokens in messages, tools or
arguments are put out of sight under a random name while the template runs, and come back as
plain text when the prompt is encoded. Loops and time of a template are limited. Not for: the
form of messages (`messages.py`), or parsing what the model answers. Next file: `server/chat.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from octavo.errors import ConfigError, InvalidRequest
from octavo.text.messages import validate_messages
from octavo.text.tokenizer import THREAD_FROM, Tokenizer

__all__ = ["ChatTemplate", "RenderedPrompt", "validate_messages"]

MAX_LOOP_STEPS = 1_000_000  # of one rendering
MAX_SECONDS = 2.0  # of processor time of one rendering
MAX_FAULTS = 5  # told of one template that does not compile
MAX_PRODUCT = 1_000_000  # length of a repeated text, digits of a power

_BUDGET = "octavo_budget"
_GIVEN = frozenset({"messages", "tools", "add_generation_prompt", _BUDGET})


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
        environment = _environment()
        try:
            tree = environment.parse(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
            _limit_loops(tree)
            code = environment.compile(tree, name, name)
        except jinja2.TemplateSyntaxError as error:
            faults = "; ".join(_faults(environment, source, error))
            raise ConfigError(f"The chat template {name}, {faults}.", "chat_template") from None
        except RecursionError:
            raise ConfigError(
                f"The chat template {name} is nested too deeply.", "chat_template"
            ) from None
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals({}))
        self._knows_developer = "developer" in source

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

    def _run(self, values: dict[str, Any]) -> str:
        assert self._template is not None
        try:
            return self._template.render({**values, _BUDGET: _Budget()})
        except _RefusedError as error:
            raise InvalidRequest(str(error), "messages") from None
        except RecursionError:
            raise
        except Exception as error:  # a template is a program: it can fail in any way
            reason = str(error).rstrip(".") or type(error).__name__
            raise InvalidRequest(
                f"The chat template of this model cannot take these messages: {reason}.", "messages"
            ) from None


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


class _RefusedError(Exception):
    """A template called `raise_exception`."""


class _Budget:
    """Counts the loop steps of one rendering and watches the clock."""

    def __init__(self) -> None:
        self._steps = 0
        self._deadline = time.thread_time() + MAX_SECONDS

    def spend(self) -> None:
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise _RefusedError(f"The chat template took more than {MAX_LOOP_STEPS} steps.")
        if self._steps % 256 == 0 and time.thread_time() > self._deadline:
            raise _RefusedError(f"The chat template took more than {MAX_SECONDS:g} seconds.")


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox, with limits on products and powers too."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if operator == "**" and isinstance(right, int) and abs(right) > 64:
            raise jinja2.exceptions.SecurityError("a power is too large")
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        repeated = isinstance(sized, (str, list, tuple)) and isinstance(times, int)
        if repeated and len(sized) * times > MAX_PRODUCT:
            raise jinja2.exceptions.SecurityError("a product is too long")
        return super().call_binop(context, operator, left, right)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the model's own words for training; here its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> _Sandbox:
    """With what model makers' templates expect: trimmed blocks, loop controls, these helpers."""
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.filters[_BUDGET] = _limited
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _faults(environment: _Sandbox, source: str, error: jinja2.TemplateSyntaxError) -> Iterator[str]:
    """The fault, and those that come to light without it, so that all can be mended at once.

    A line is left out for that only if it is an expression: without a block's beginning or end,
    others would look wrong that are not.
    """
    lines = re.split("\r\n|\r|\n", source)  # as Jinja counts them
    for _ in range(MAX_FAULTS):
        at = error.lineno
        yield f"line {at}: {(error.message or 'it cannot be read').rstrip('.')}"
        if at > len(lines) or "{{" not in lines[at - 1] or "{%" in lines[at - 1]:
            return
        lines[at - 1] = ""
        try:
            environment.parse("\n".join(lines))
        except jinja2.TemplateSyntaxError as further:
            error = further
        else:
            return


def _limit_loops(tree: jinja2.nodes.Template) -> None:
    """Let every loop take its items through the filter that counts them."""
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = jinja2.nodes.Filter(
            loop.iter, _BUDGET, [], [], None, None, lineno=loop.lineno, environment=tree.environment
        )


@jinja2.pass_context
def _limited(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    spend: Callable[[], None] = context.resolve(_BUDGET).spend
    for item in items:
        spend()
        yield item


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models have not seen."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise _RefusedError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
