"""What a request asks of its answer beyond text: tools, whether one must be called, reasoning.

`Plan` is made before the prompt and says how the answer is read, which form the engine must give
it, and which tools the template gets. Not for: how calls are written (`text/tools/`), JSON of
answers (`chat.py`). Next file: `calls.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from octavo.errors import InvalidRequest
from octavo.grammar.request import Preamble, StructuralTag, StructuredOutputs, Tag
from octavo.sampling_params import SamplingParams
from octavo.server.context import Serving
from octavo.server.engine import Engine
from octavo.server.settings import ServerSettings
from octavo.text.chat import ChatTemplate
from octavo.text.reader import AnswerReader
from octavo.text.reasoning import Place, ReasoningFamily, reasoning_of
from octavo.text.tokenizer import Tokenizer
from octavo.text.tools.choose import HERMES, Family, family_of
from octavo.text.tools.declare import Choice, Tool, read_choice, read_tools

MAX_SUSPECTS = 16  # tools that are looked at one by one when all together cannot be enforced
OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one request's answers are to be read. Without tools and reasoning it does nothing."""

    tools: tuple[Tool, ...] = ()
    choice: Choice = field(default_factory=Choice)
    family: Family | None = None  # None: calls are not looked for
    reasoning: ReasoningFamily | None = None
    include_reasoning: bool = True
    only_first: bool = False  # one call at most
    describes: bool = False  # tools stand in a system message, as the template knows none
    place: Place = "answer"  # where the answer begins, once the prompt is known

    @property
    def reads(self) -> bool:
        """True if answers are more than their text."""
        return self.family is not None or self.reasoning is not None

    def after(self, prompt: str, continued: str | None) -> Plan:
        """The plan for answers to a prompt; `continued` is the message that they go on with."""
        if self.reasoning is None:
            return self
        return replace(self, place=self.reasoning.place(prompt, continued))

    def reader(self) -> AnswerReader:
        """A reader of one answer."""
        calls = None
        if self.family is not None:
            calls = self.family.parser(
                self.tools, forced=self.choice.forced, only_first=self.only_first
            )
        thought = None if self.reasoning is None else self.reasoning.reader(self.place)
        return AnswerReader(thought, calls, calls_only=self.choice.forced)

    def shows_specials(self, tokenizer: Tokenizer) -> bool:
        """True if marks that the reader looks for are special tokens, which texts leave out."""
        marks: tuple[str, ...] = () if self.family is None else self.family.markers
        if self.reasoning is not None:
            marks += (self.reasoning.open, self.reasoning.close)
        return any(tokenizer.find_special(mark) for mark in marks)

    def form(self, wanted: StructuredOutputs | None) -> StructuredOutputs | None:
        """The form of the answer: calls that are forced, and the one that the caller `wanted`.

        It holds for what comes after the model's thought. Raises InvalidRequest if both cannot
        hold.
        """
        form = self._answer_form(wanted)
        thought = self.reasoning
        if form is None or thought is None or self.place == "answer":
            return form
        begin = thought.open if self.place == "open" else ""
        preamble = Preamble(end=thought.close, begin=begin)
        return msgspec.structs.replace(form, preamble=preamble)

    def _answer_form(self, wanted: StructuredOutputs | None) -> StructuredOutputs | None:
        if self.family is None or self.choice.mode == "none":
            return wanted
        if self.choice.forced:
            return StructuredOutputs(structural_tag=self._calls(self.family))
        if wanted is not None:
            return StructuredOutputs(structural_tag=self._either(self.family, wanted))
        if self.family.trigger and any(tool.strict for tool in self.tools):
            return StructuredOutputs(structural_tag=self._strict(self.family))
        return None

    def _calls(self, family: Family) -> StructuralTag:
        """Nothing but calls."""
        return StructuralTag(
            tags=[_tag(family, tool) for tool in self.tools if tool.name in self.choice.names],
            free_text=False,
            at_least_one=True,
            stop_after_first=self.only_first or len(self.choice.names) == 1,
            separator=family.separator,
        )

    def _either(self, family: Family, wanted: StructuredOutputs) -> StructuralTag:
        """A call, or JSON as the caller wants it."""
        schema = wanted.json if wanted.json is not None else OBJECT if wanted.json_object else None
        if schema is None or isinstance(schema, str):
            raise InvalidRequest(
                "structured_outputs does not go with tools that the model may call, unless it is a "
                "JSON schema as an object; set tool_choice to none or required.",
                "structured_outputs",
            )
        return StructuralTag(
            tags=[
                *(_tag(family, tool) for tool in self.tools),
                Tag(begin="", end="", schema=schema),
            ],
            free_text=False,
            at_least_one=True,
            stop_after_first=True,
        )

    def _strict(self, family: Family) -> StructuralTag:
        """Free text, in which a call of a strict tool keeps to its schema."""
        return StructuralTag(
            tags=[_tag(family, tool, loose=not tool.strict) for tool in self.tools],
            triggers=[family.trigger],
        )


def _tag(family: Family, tool: Tool, *, loose: bool = False) -> Tag:
    begin, end = family.marks(tool)
    return Tag(begin=begin, end=end, schema=OBJECT if loose else tool.parameters)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The fields of a request that a plan is made of."""

    tools: object = None
    tool_choice: object = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


def plan(serving: Serving, wishes: Wishes, template: ChatTemplate) -> Plan:
    """Check what a request says of tools. Raises InvalidRequest naming the place."""
    settings = serving.settings
    tools = read_tools(wishes.tools)
    choice = read_choice(wishes.tool_choice, tools)
    family = None
    if choice.mode != "none":
        family = _family(settings, choice, template)
    return Plan(
        tools=tuple(tools) if family is not None or template.takes_tools else (),
        describes=family is not None and not template.takes_tools,
        choice=choice,
        family=family,
        reasoning=reasoning_of(settings.reasoning_parser, template.source),
        include_reasoning=wishes.include_reasoning is not False,
        only_first=wishes.parallel_tool_calls is False,
    )


def _family(settings: ServerSettings, choice: Choice, template: ChatTemplate) -> Family:
    """How calls are written. Raises InvalidRequest if nobody knows, or calls are off."""
    if not choice.forced and not settings.enable_auto_tool_choice:
        raise InvalidRequest(
            "tools: the model may not call tools by itself here. Send tool_choice required, none "
            "or a function, or let the operator start the server with --enable-auto-tool-choice.",
            "tools",
        )
    family = family_of(settings.tool_call_parser, template.source)
    if template.takes_tools:
        if family is not None or choice.forced:
            return family or HERMES
        raise InvalidRequest(
            "tools: it is not known how this model writes calls. Send tool_choice required or a "
            "function, or let the operator name a form with --tool-call-parser.",
            "tools",
        )
    if choice.forced or settings.tool_call_parser == "hermes":
        return HERMES  # as the system message describes it
    raise InvalidRequest(
        "tools are not supported by the chat template of this model. Send tool_choice required or "
        "a function, or let the operator give a template with --chat-template, or have tools "
        "described in a system message with --tool-call-parser hermes.",
        "tools",
    )


def apply(plan: Plan, params: SamplingParams, tokenizer: Tokenizer) -> None:
    """Put into the settings what the plan needs of the engine."""
    form = plan.form(params.structured_outputs)
    if form is not None:
        params.structured_outputs = form
        params.verify()
    if plan.shows_specials(tokenizer):
        params.skip_special_tokens = False


async def compiled(plan: Plan, params: SamplingParams, engine: Engine) -> None:
    """Lets the engine make the grammar. Raises InvalidRequest, naming the tool that is at fault."""
    try:
        await engine.compile(params)
    except InvalidRequest:
        if plan.family is None:
            raise
        for place, tool in enumerate(plan.tools[:MAX_SUSPECTS]):
            await _check_alone(engine, tool, f"tools[{place}].function.parameters")
        raise


async def _check_alone(engine: Engine, tool: Tool, at: str) -> None:
    form = StructuredOutputs(json=tool.parameters)
    try:
        await engine.compile(SamplingParams(structured_outputs=form))
    except InvalidRequest as error:
        message = error.message.removeprefix("structured_outputs.json")
        raise InvalidRequest(f"{at}{message}", at) from None
