"""Makes command line flags of option records, and records of parsed flags.

A flag is absent from the parsed result unless it was given, so its source is known. Not for:
the options themselves (`options.py`), the meaning of a value (`fields.py`).
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from octavo.errors import ConfigError
from octavo.fields import Option, Record, flag_of, options_of, parse, unknown_name
from octavo.options import EngineArgs, ServerArgs, read_file


class Parser(argparse.ArgumentParser):
    """Argument parser of one subcommand, with suggestions for what it does not know."""

    def __init__(self, command: str, summary: str) -> None:
        super().__init__(
            prog=f"octavo {command}",
            description=summary[:1].upper() + summary[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parses `words`; `--max_num_seqs` is taken as `--max-num-seqs`. Exits 2 on errors."""
        known, rest = self.parse_known_args([_dashed(word) for word in words])
        if rest:
            flags = [word for word in rest if word.startswith("--")]
            self.error(self._unknown(flags[0]) if flags else f"unexpected argument {rest[0]!r}")
        return known

    def error(self, message: str) -> NoReturn:
        """Exits with 2 and one line, not with the long list of flags."""
        print(f"{self.prog}: {message}", file=sys.stderr)
        print(f"`{self.prog} --help` lists all options.", file=sys.stderr)
        sys.exit(2)

    def _unknown(self, word: str) -> str:
        flag = word.partition("=")[0]
        names = [
            known[2:].replace("-", "_")
            for known in self._option_string_actions
            if known.startswith("--")
        ]
        return unknown_name(flag[2:].replace("-", "_"), names, flag)


def _dashed(word: str) -> str:
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value


def suggest(word: str, known: Iterable[str]) -> str:
    """The sentence for a subcommand that does not exist."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    hint = f"did you mean `octavo {near[0]}`?" if near else "`octavo --help` lists them."
    return f"there is no command `{word}`; {hint}"


def add_options(parser: argparse.ArgumentParser, *records: type[Record]) -> None:
    """Adds a flag for each option of the records, in the options' groups."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for record in records:
        for name, details in options_of(record).items():
            group = groups.get(details.group)
            if group is None:
                group = groups[details.group] = parser.add_argument_group(details.group.lower())
            _add_flag(group, name, details)


def _add_flag(group: argparse._ArgumentGroup, name: str, details: Option) -> None:
    shared: dict[str, Any] = {
        "dest": name,
        "default": argparse.SUPPRESS,
        "help": argparse.SUPPRESS if details.hidden else help_of(details),
    }
    if details.kind == "bool":
        group.add_argument(flag_of(name), action=argparse.BooleanOptionalAction, **shared)
        return
    shared["metavar"] = metavar_of(details)
    if details.kind == "list":
        group.add_argument(
            flag_of(name), action=_Extend, nargs="+", type=partial(_read, details), **shared
        )
        return
    if details.choices:
        shared["choices"] = details.choices
    group.add_argument(flag_of(name), type=partial(_read, details), **shared)


class _Extend(argparse.Action):
    """Adds the values of a repeated list flag up."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, *_: Any) -> None:
        so_far = vars(namespace).get(self.dest, [])
        setattr(namespace, self.dest, [*so_far, *(item for part in values for item in part)])


def _read(details: Option, text: str) -> object:
    try:
        return parse(details, text, "the value")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None


def metavar_of(details: Option) -> str:
    """The placeholder of a value in help."""
    if details.choices:
        return "{" + ",".join(details.choices) + "}"
    shown = {"int": "N", "size": "N", "float": "X", "json": "JSON", "str": "TEXT", "list": "TEXT"}
    return "|".join((shown[details.kind], *details.words))


def help_of(details: Option) -> str:
    """Help text with the variables that set the option."""
    text = details.help.replace("%", "%%")
    return f"{text} [{', '.join(details.env)}]" if details.env else text


def add_model(parser: argparse.ArgumentParser) -> None:
    """The positional MODEL; `--model` says the same."""
    parser.add_argument(
        "model_name",
        nargs="?",
        metavar="MODEL",
        help="folder, GGUF file, hub id or pulled name; smollm2-135m if left out",
    )


def given(namespace: argparse.Namespace, *records: type[Record]) -> dict[str, object]:
    """The flags of the records that were on the command line, MODEL as `model` among them."""
    values = dict(vars(namespace))
    positional = values.pop("model_name", None)
    if positional is not None:
        if values.get("model", positional) != positional:
            raise ConfigError(
                f"MODEL is {positional!r} and --model is {values['model']!r}; give one of them.",
                "model",
            )
        values["model"] = positional
    names = {name for record in records for name in options_of(record)}
    return {name: value for name, value in values.items() if name in names}


def engine_args(namespace: argparse.Namespace) -> EngineArgs:
    """The engine's options from flags, environment and `--config`, checked."""
    flags = given(namespace, EngineArgs)
    record = EngineArgs.gather(flags, *_file(namespace))
    record.check()
    return record


def server_args(namespace: argparse.Namespace) -> ServerArgs:
    """The server's options from flags, environment and `--config`, checked."""
    record = ServerArgs.gather(given(namespace, ServerArgs), *_file(namespace))
    record.check()
    return record


def _file(namespace: argparse.Namespace) -> tuple[Mapping[str, object], str]:
    path = vars(namespace).get("config")
    return (read_file(path), path) if path else ({}, "")


def add_config(parser: argparse.ArgumentParser) -> None:
    """The flag `--config`."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML, TOML or JSON file of options; flags and the environment win over it",
    )


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Rows of (option, value, source) in columns."""
    widths = [max((len(row[column]) for row in rows), default=0) for column in (0, 1)]
    return "\n".join(
        f"  {name:<{widths[0]}}  {value:<{widths[1]}}  {source}" for name, value, source in rows
    )
