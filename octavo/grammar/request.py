"""`StructuredOutputs`: the form that a caller demands of an answer, with its rules.

Exactly one of a JSON schema, any JSON object, a regular expression, a list of choices, a grammar,
or tags within free text (how tool calls are forced). What a value may be is checked when the record
is made; whether its schema or grammar can be enforced is checked by compiling it (`check.py`).
Not for: making a grammar of it. Next file: `forms.py`.
"""

from __future__ import annotations

from typing import Any, NoReturn, TypeAlias

import msgspec

from octavo.errors import InvalidRequest

PARAM = "structured_outputs"
MAX_CHOICES = 1024
MAX_TEXT = 2**16  # characters of a regular expression, a grammar, or all choices together
MAX_TAGS = 128
MAX_MARK = 256  # characters of the begin, end or trigger of a tag

Schema: TypeAlias = dict[str, Any] | bool


class Tag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`begin`, then JSON that `schema` allows, then `end`."""

    begin: str
    end: str
    schema: Schema = True


class StructuralTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Text in which tags may stand, such as calls of tools.

    With `free_text`, anything may be written until one of `triggers` has been; from there on only
    the tags that begin with it are possible, and after the tag's end the text is free again.
    Without it the answer is tags alone, with `separator` between two. Texts of special tokens in
    `begin`, `end` and `triggers` mean these tokens.
    """

    tags: list[Tag]
    triggers: list[str] = []
    free_text: bool = True
    at_least_one: bool = False  # the answer may not end before a tag has
    stop_after_first: bool = False  # nothing comes after the first tag's end
    separator: str = ""

    def __post_init__(self) -> None:
        if not 1 <= len(self.tags) <= MAX_TAGS:
            _refuse("structural_tag", f"it has {len(self.tags)} tags; send 1 to {MAX_TAGS}")
        texts = [self.separator, *self.triggers]
        texts += [text for tag in self.tags for text in (tag.begin, tag.end)]
        for text in texts:
            _check_text("structural_tag", text, MAX_MARK)
        if not self.free_text:
            return
        for tag in self.tags:
            if not any(trigger and tag.begin.startswith(trigger) for trigger in self.triggers):
                _refuse(
                    "structural_tag",
                    f"the tag {tag.begin[:40]!r} begins with none of the triggers; add one",
                )


class Preamble(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Free text that comes before the form, up to `end` and a few line breaks.

    With `begin` it may be left out, and is there only if the answer begins so.
    """

    end: str
    begin: str = ""


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of an answer; exactly one of the first six is set.

    Raises `InvalidRequest` from the constructor, naming the field and what is allowed.
    """

    json: str | dict[str, Any] | bool | None = None  # a JSON schema, or its text
    json_object: bool | None = None  # any JSON object
    regex: str | None = None  # the whole answer matches
    choice: list[str] | None = None  # the answer is one of these
    grammar: str | None = None  # Lark, or GBNF (EBNF) that defines `root`
    structural_tag: Any = None  # a StructuralTag, or an object or text that `read_tags` can read
    disable_any_whitespace: bool = False  # JSON without any white space between its tokens
    disable_additional_properties: bool = False  # objects have no properties but those named
    whitespace_pattern: str | None = None
    preamble: Preamble | None = None  # set by the server, for the thoughts of a model

    def __post_init__(self) -> None:
        self.verify()

    def verify(self) -> None:
        """Check all fields; call it again after changing one."""
        if self.json_object is False:
            self.json_object = None
        names = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
        values = msgspec.structs.asdict(self)
        given = [name for name in names if values[name] is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise InvalidRequest(
                f"{PARAM} has {found} of {', '.join(names)}; set exactly one.", PARAM
            )
        if self.preamble is not None and not isinstance(self.preamble, Preamble):
            _refuse("preamble", "it is not set by callers; leave it out")
        if self.whitespace_pattern is not None:
            _refuse(
                "whitespace_pattern",
                "it is not supported; white space is bounded, or use disable_any_whitespace",
            )
        for name in ("disable_any_whitespace", "disable_additional_properties"):
            if not isinstance(values[name], bool):
                _refuse(name, "use true or false")
            if values[name] and given[0] not in ("json", "json_object", "structural_tag"):
                _refuse(name, f"it goes with json and json_object, not with {given[0]}")
        self._verify_value(given[0])

    def _verify_value(self, name: str) -> None:
        match name:
            case "json" if not isinstance(self.json, (str, dict, bool)):
                _refuse("json", "send a JSON schema as an object or as text")
            case "json_object" if self.json_object is not True:
                _refuse("json_object", "use true, or leave it out")
            case "regex":
                _check_text("regex", self.regex, MAX_TEXT)
            case "grammar":
                _check_text("grammar", self.grammar, MAX_TEXT)
            case "choice":
                self._verify_choice()
            case "structural_tag" if not isinstance(self.structural_tag, StructuralTag):
                self.structural_tag = read_tags(self.structural_tag)

    def _verify_choice(self) -> None:
        choice: object = self.choice
        if not isinstance(choice, (list, tuple)) or not 1 <= len(choice) <= MAX_CHOICES:
            _refuse("choice", f"send a list of 1 to {MAX_CHOICES} texts")
        for text in choice:
            _check_text("choice", text, MAX_TEXT)
            if not text:
                _refuse("choice", "a choice is empty; each needs at least one character")
        if sum(map(len, choice)) > MAX_TEXT:
            _refuse("choice", f"its texts have more than {MAX_TEXT} characters together")


class Form(msgspec.Struct, frozen=True):
    """What was made of a demand: the text of a grammar that has been compiled and tried."""

    text: str
    json: bool = False  # all of the answer is JSON


StructuredOutputsParams = StructuredOutputs  # its name in other engines


def structured_outputs(value: object) -> StructuredOutputs:
    """The record that `value` is or describes. Raises InvalidRequest."""
    if isinstance(value, StructuredOutputs):
        value.verify()
        return value
    if not isinstance(value, dict):
        raise InvalidRequest(
            f"{PARAM} must be an object with one of json, json_object, regex, choice, grammar.",
            PARAM,
        )
    known = StructuredOutputs.__struct_fields__
    for name in value:
        if name not in known:
            raise InvalidRequest(
                f"{PARAM}.{str(name)[:40]} is not a known field; use one of {', '.join(known)}.",
                PARAM,
            )
    return StructuredOutputs(**value)


def read_tags(value: object) -> StructuralTag:
    """The record that a structural tag of other engines describes, in its older and newer form.

    Older: `{"structures": [{begin, schema, end}], "triggers": [...]}`; newer: `{"format": ...}`
    of type triggered_tags, tags_with_separator or tag, whose contents are JSON schemas.
    """
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError) as error:
            _refuse("structural_tag", f"it is not JSON: {error}")
    if not isinstance(value, dict):
        _refuse("structural_tag", "send an object")
    kind = value.get("type", "structural_tag")
    if kind != "structural_tag":
        _refuse("structural_tag", f"its type is {str(kind)[:40]!r}; use structural_tag")
    if "tags" in value:
        return _tags_record({name: value[name] for name in value if name != "type"})
    if "structures" in value:
        _known(value, "type", "structures", "triggers")
        return _tags_record({"tags": value["structures"], "triggers": value.get("triggers", [])})
    _known(value, "type", "format")
    form = value.get("format")
    if not isinstance(form, dict):
        _refuse("structural_tag", "it has neither structures nor format")
    flags = {n: form[n] for n in ("at_least_one", "stop_after_first") if n in form}
    match form.get("type"):
        case "triggered_tags":
            _known(form, "type", "triggers", "tags", *flags)
            tags = [_tag(tag) for tag in _list(form.get("tags"))]
            return _tags_record({"tags": tags, "triggers": form.get("triggers", []), **flags})
        case "tags_with_separator":
            _known(form, "type", "separator", "tags", *flags)
            tags = [_tag(tag) for tag in _list(form.get("tags"))]
            separator = form.get("separator", "")
            return _tags_record({"tags": tags, "free_text": False, "separator": separator, **flags})
        case "tag":
            only = {"free_text": False, "at_least_one": True, "stop_after_first": True}
            return _tags_record({"tags": [_tag(form)], **only})
    raise InvalidRequest(
        f"{PARAM}.structural_tag: its format {str(form.get('type'))[:40]!r} is not supported; use "
        "triggered_tags, tags_with_separator or tag.",
        PARAM,
    )


def _tag(tag: object) -> dict[str, Any]:
    if not isinstance(tag, dict):
        _refuse("structural_tag", "a tag is an object")
    _known(tag, "type", "begin", "content", "end")
    content = tag.get("content")
    if not isinstance(content, dict) or content.get("type") != "json_schema":
        _refuse("structural_tag", "the content of a tag must be of type json_schema")
    _known(content, "type", "json_schema")
    return {"begin": tag.get("begin"), "schema": content.get("json_schema"), "end": tag.get("end")}


def _tags_record(fields: dict[str, Any]) -> StructuralTag:
    try:
        return msgspec.convert(fields, StructuralTag)
    except msgspec.ValidationError as error:
        _refuse("structural_tag", str(error))


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        _refuse("structural_tag", "tags must be a list")
    return value


def _known(value: dict[str, Any], *names: str) -> None:
    for name in value:
        if name not in names:
            _refuse("structural_tag", f"{str(name)[:40]!r} is not known there; leave it out")


def _check_text(name: str, text: object, limit: int) -> None:
    if not isinstance(text, str):
        _refuse(name, "use text")
    if len(text) > limit:
        _refuse(name, f"a text of {len(text)} characters is too long; use at most {limit}")
    if "\0" in text or any("\ud800" <= letter <= "\udfff" for letter in text):
        _refuse(name, "a text holds NUL or half a surrogate pair; leave it out")


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{PARAM}.{name}: {why}.", PARAM)
