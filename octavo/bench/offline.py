"""What the two benchmarks without a server share: engine flags, prompts, and the engine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from octavo.cli.flags import add_options, engine_args
from octavo.options import EngineArgs

if TYPE_CHECKING:
    from octavo.llm import LLM


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Every engine flag."""
    parser.add_argument("--config", metavar="FILE", help="file of options")
    add_options(parser, EngineArgs)


def open_engine(args: argparse.Namespace) -> LLM:
    """The engine that the flags describe, in this process."""
    from octavo.llm import LLM

    return LLM.from_engine_args(engine_args(args))
