"""`octavo bench NAME`: hands over to the benchmark's own module.

Not for: the benchmarks (`octavo/bench/`), each of which has `add_arguments(parser)` and
`run(args) -> int`.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from octavo.cli.flags import Parser


def run(parser: Parser, name: str, words: Sequence[str]) -> int:
    """Parses `words` with the benchmark's options and runs it."""
    module = importlib.import_module(f"octavo.bench.{name}")
    module.add_arguments(parser)
    return int(module.run(parser.parse(words)))
