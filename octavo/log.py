"""Logging as key=value pairs, one line an event.

`Log(__name__).info("ready", port=8000)` writes `time INFO ready port=8000`. Values with spaces are
quoted, so a line can be split again. Not for: per-token work (nothing is logged there), metrics.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO


def setup(level: str = "info", stream: TextIO | None = None) -> None:
    """Sends events of all Octavo modules to `stream` (stderr). Calling it again replaces that."""
    root = logging.getLogger("octavo")
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S"))
    root.handlers = [handler]
    root.setLevel(level.upper())
    root.propagate = False
    # It warns for each write to a client that has left; that is no event of ours.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def pairs(fields: dict[str, object]) -> str:
    """`a=1 b="two words"`."""
    return " ".join(f"{key}={_text(value)}" for key, value in fields.items())


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    if text == "" or any(char in ' "=\n\r\t' for char in text):
        return json.dumps(text, ensure_ascii=False)
    return text


class Log:
    """Writes events of one module."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name if name.startswith("octavo") else f"octavo.{name}")

    def debug(self, event: str, **fields: object) -> None:
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, **fields: object) -> None:
        self._write(logging.ERROR, event, fields)

    def _write(self, level: int, event: str, fields: dict[str, object]) -> None:
        if self._logger.isEnabledFor(level):
            text = f"{event} {pairs(fields)}" if fields else event
            self._logger.log(level, "%s", text)
