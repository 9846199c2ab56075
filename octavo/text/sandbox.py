"""The box in which chat templates run: what they reach, and what they may cost.

Jinja's sandbox keeps templates away from everything that is not text, list or mapping. Here the
costs are limited too, for a template may come from a caller: loop steps and processor time of one
rendering, the texts that it makes, one by one and together, what a single operation may blow up
(products, paddings, replacements), and what is given to filters that take their time. Not for:
messages or prompts. Next file: `chat.py`.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

MAX_LOOP_STEPS = 1_000_000  # of one rendering
MAX_SECONDS = 2.0  # of processor time of one rendering
MAX_FAULTS = 5  # told of one template that does not compile
MAX_PRODUCT = 1_000_000  # length of a repeated text, width of a padding
MAX_TEXT = 2**25  # characters of one text that an operation makes
MAX_TEXTS = 2**27  # characters of all of them in one rendering
MAX_BITS = 2**16  # of a whole number
MAX_INDENT = 32  # of JSON
LONG = 256  # characters of a text after which the time is looked at

BUDGET = "octavo_budget"  # the variable that holds the rendering's `Budget`
_LOOP, _TEXT = "octavo_loop", "octavo_text"  # filters put in by `_guard_tree`
_WIDE = re.compile(r"\d{7,}|\*")  # a width in a format that no prompt has
_MAKE_BYTES = ("encode", "to_bytes")  # which no prompt needs and no limit here measures
# Filters that take next to no time for each character or item; the others get no large values.
_QUICK_FILTERS = frozenset(
    {
        *("abs", "attr", "capitalize", "count", "d", "default", "e", "escape", "first", "float"),
        *("indent", "int", "items", "join", "last", "length", "list", "lower", "map", "reject"),
        *("rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "string"),
        *("tojson", "trim", "upper", _LOOP, _TEXT),
    }
)
_LAZY_FILTERS = ("map", "select", "reject", "selectattr", "rejectattr")  # loops of their own
_SLOW_FILTERS = frozenset({"wordwrap", "urlize"})  # and these take more for each the more there are
MAX_OPERAND = 2**16  # characters or items
MAX_SLOW_OPERAND = 2**13
_SIZED_FILTERS = ("center", "indent", "truncate", "wordwrap", "batch", "slice", "round")


class RefusedError(Exception):
    """A template called `raise_exception`, or used up its budget."""


class Budget:
    """What one rendering has spent: loop steps, processor time, characters."""

    def __init__(self, seconds: float | None = None) -> None:
        """`seconds` of processor time, or the usual limit."""
        self._seconds = MAX_SECONDS if seconds is None else seconds
        self._steps = 0
        self._characters = 0
        self._deadline = time.thread_time() + self._seconds

    def spend(self) -> None:
        """One step of a loop, or one call."""
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise RefusedError(f"The chat template took more than {MAX_LOOP_STEPS} steps.")
        if self._steps % 256 == 0:
            self._check_time()

    def _check_time(self) -> None:
        if time.thread_time() > self._deadline:
            raise RefusedError(f"The chat template took more than {self._seconds:g} seconds.")

    def spend_text(self, made: Any) -> None:
        """A text or list that an operation has made."""
        if isinstance(made, (str, list, tuple)):
            self._characters += len(made)
            if len(made) > LONG:
                self._check_time()
            if len(made) > MAX_TEXT or self._characters > MAX_TEXTS:
                raise RefusedError(f"The chat template made texts of over {MAX_TEXT} characters.")


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits, and with what model makers' templates expect.

    That is: trimmed blocks, loop controls, and a few helpers.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            optimized=False,  # nothing is computed before there is a budget
        )
        self.filters["tojson"] = _tojson
        self.filters[_LOOP], self.filters[_TEXT] = _limited, _counted
        for name in _SIZED_FILTERS:
            self.filters[name] = _sized(self.filters[name])
        self.filters["replace"] = _replace
        self.filters["join"] = _join
        self.filters["format"] = _format
        for name in _LAZY_FILTERS:
            self.filters[name] = _metered(self.filters[name])
        for name in self.filters.keys() - _QUICK_FILTERS:
            limit = MAX_SLOW_OPERAND if name in _SLOW_FILTERS else MAX_OPERAND
            self.filters[name] = _light(self.filters[name], name, limit)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        del self.globals["lipsum"]

    def compiled(self, source: str, name: str) -> tuple[jinja2.Template, frozenset[str]]:
        """The template, and the names of what it reads. Raises TemplateSyntaxError."""
        tree = self.parse(source)
        variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        _guard_tree(tree)
        code = self.compile(tree, name, name)
        return jinja2.Template.from_code(self, code, self.make_globals({})), variables

    def faults(self, source: str, error: jinja2.TemplateSyntaxError) -> Iterator[str]:
        """The fault, and those that come to light without it, so that all can be mended at once.

        A line is left out for that only if it is an expression: without a block's beginning or
        end, others would look wrong that are not.
        """
        lines = re.split("\r\n|\r|\n", source)  # as Jinja counts them
        for _ in range(MAX_FAULTS):
            at = error.lineno
            yield f"line {at}: {(error.message or 'it cannot be read').rstrip('.')}"
            if at > len(lines) or "{{" not in lines[at - 1] or "{%" in lines[at - 1]:
                return
            lines[at - 1] = ""
            try:
                self.parse("\n".join(lines))
            except jinja2.TemplateSyntaxError as further:
                error = further
            else:
                return

    def call_binop(
        self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any
    ) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            _check_number(operator, left, right)
        sized, times = (right, left) if isinstance(left, int) else (left, right)
        if operator == "*" and isinstance(sized, (str, list, tuple)) and isinstance(times, int):
            _bound(len(sized) * times, MAX_PRODUCT)
        if operator == "%" and isinstance(left, str):
            _check_format(left)
        if operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            _bound(len(left) + len(right), MAX_TEXT)
        made = super().call_binop(context, operator, left, right)
        context.resolve(BUDGET).spend_text(made)
        return made

    def call(
        self, context: jinja2.runtime.Context, function: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        budget: Any = context.resolve(BUDGET)
        budget.spend()  # macros that call each other are loops too
        if isinstance(function, BuiltinMethodType) and function.__name__ in _MAKE_BYTES:
            raise jinja2.exceptions.SecurityError(f"{function.__name__} is not allowed")
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            if function.__name__ == "join":
                args = tuple(list(argument) for argument in args)
            _check_method(function.__self__, function.__name__, (*args, *kwargs.values()))
        made = super().call(context, function, *args, **kwargs)
        budget.spend_text(made)
        return made

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_method(value.__self__, "format", (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded


def _guard_tree(tree: jinja2.nodes.Template) -> None:
    """Let every loop and every expression that makes a text pass the budget."""
    filters = list(tree.find_all((jinja2.nodes.Filter, jinja2.nodes.Concat)))
    for loop in tree.find_all(jinja2.nodes.For):
        loop.iter = _through(_LOOP, loop.iter, tree)
    for output in tree.find_all(jinja2.nodes.Output):
        output.nodes = [
            part if isinstance(part, jinja2.nodes.TemplateData) else _through(_TEXT, part, tree)
            for part in output.nodes
        ]
    for assigned in tree.find_all(jinja2.nodes.Assign):
        assigned.node = _through(_TEXT, assigned.node, tree)
    for node in filters:
        if isinstance(node, jinja2.nodes.Filter) and node.node is not None:
            node.node = _through(_TEXT, node.node, tree)


# -- limits of single operations --


def _bound(size: int, limit: int) -> None:
    if size > limit:
        raise jinja2.exceptions.SecurityError(f"a text or list of {size} would be made")


def _check_number(operator: str, left: int, right: int) -> None:
    bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length()
    if operator in ("*", "**") and bits + right.bit_length() > MAX_BITS:
        raise jinja2.exceptions.SecurityError("a number is too large")


def _check_format(layout: str) -> None:
    if _WIDE.search(layout):
        raise jinja2.exceptions.SecurityError("a format is too wide")


def _check_method(text: str, name: str, values: Sequence[Any]) -> None:
    """Raises SecurityError if a method of a text would make one that is far longer."""
    for value in values:
        if isinstance(value, int):
            _bound(abs(value) * (text.count("\t") if name == "expandtabs" else 1), MAX_PRODUCT)
    if name in ("format", "format_map"):
        _check_format(text)
    elif name == "translate":
        raise jinja2.exceptions.SecurityError("translate is not allowed")
    elif name == "replace" and len(values) > 1 and all(isinstance(v, str) for v in values[:2]):
        _bound(text.count(values[0]) * len(values[1]), MAX_TEXT)
    elif name == "join" and values:
        _bound(len(values[0]) * len(text) + sum(len(v) for v in values[0] if v), MAX_TEXT)


def _sized(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose numbers are bounded, for each line that the text has."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        lines = max((a.count("\n") + 1 for a in args if isinstance(a, str)), default=1)
        for value in (*args, *kwargs.values()):
            if isinstance(value, int):
                _bound(abs(value) * lines, MAX_PRODUCT)
        return function(*args, **kwargs)

    return checked


def _light(function: Callable[..., Any], name: str, limit: int) -> Callable[..., Any]:
    """A filter that is given nothing larger than `limit` characters or items."""

    def fit(value: Any) -> Any:
        if isinstance(value, (str, list, tuple, dict)):
            if len(value) > limit:
                raise jinja2.exceptions.SecurityError(
                    f"{name} is given {len(value)} characters or items; at most {limit} will do"
                )
        elif isinstance(value, Iterator):
            return fit(list(itertools.islice(value, limit + 1)))
        return value

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return function(*map(fit, args), **{key: fit(value) for key, value in kwargs.items()})

    return checked


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that yields items, each a step of a loop."""

    @functools.wraps(function)
    def metered(context: jinja2.runtime.Context, *args: Any, **kwargs: Any) -> Iterator[Any]:
        return iter(_limited(context, function(context, *args, **kwargs)))

    return metered


def _replace(text: str, old: str, new: str, count: int | None = None) -> str:
    _check_method(str(text), "replace", (old, new))
    return str(text).replace(old, new, -1 if count is None else count)


def _join(items: Iterable[Any], between: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        raise jinja2.exceptions.SecurityError("join takes no attribute here; use map before it")
    texts = [str(item) for item in items]
    _check_method(str(between), "join", (texts,))
    return str(between).join(texts)


def _format(layout: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(layout))
    return str(layout) % (kwargs or args)


# -- what _guard_tree puts in --


def _through(name: str, node: jinja2.nodes.Node, tree: jinja2.nodes.Template) -> Any:
    assert isinstance(node, jinja2.nodes.Expr)
    return jinja2.nodes.Filter(
        node, name, [], [], None, None, lineno=node.lineno, environment=tree.environment
    )


@jinja2.pass_context
def _limited(context: jinja2.runtime.Context, items: Iterable[Any]) -> Iterator[Any]:
    spend: Callable[[], None] = context.resolve(BUDGET).spend
    for item in items:
        spend()
        yield item


@jinja2.pass_context
def _counted(context: jinja2.runtime.Context, made: Any) -> Any:
    context.resolve(BUDGET).spend_text(made)
    return made


# -- what templates are given --


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the model's own words for training; here its body alone."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes for HTML, which models have not seen."""
    if indent is not None:
        _bound(int(indent), MAX_INDENT)
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise RefusedError(str(message))


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(str(layout)[:1000])
