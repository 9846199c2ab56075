"""`octavo route`: a small router over engines. Not for: choosing (`octavo/platform/route.py`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
from collections.abc import Iterator

import uvicorn

from octavo.errors import ConfigError
from octavo.platform.route import Application, Backend

EPILOG = """
example:
  octavo route --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002 --port 4100
"""


class _Server(uvicorn.Server):
    """Ends with 0 after a signal, instead of sending it to itself again."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end)
        yield

    def _end(self) -> None:
        self.should_exit = True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Engines, and where to listen."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--backend",
        action="append",
        required=True,
        metavar="URL[=WEIGHT]",
        help="an engine's address, and its share beside the others; give it again for more",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=4100, help="port to listen on")


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it, and what runs has ended."""
    app = Application([Backend(*_parsed(text)) for text in args.backend]).app
    config = uvicorn.Config(
        app, host=args.host, port=args.port, log_level="warning", access_log=False
    )
    server = _Server(config)
    asyncio.run(server.serve())
    return 0 if server.started else 1


def _parsed(text: str) -> tuple[str, float]:
    """(address, weight). Raises ConfigError."""
    url, _, weight = text.partition("=")
    try:
        share = float(weight or 1)
    except ValueError:
        share = 0.0
    if not url.startswith(("http://", "https://")) or not share > 0:
        raise ConfigError(
            f"--backend {text}: write http://HOST:PORT, or http://HOST:PORT=2 for a weight of 2.",
            "backend",
        )
    return url.rstrip("/").removesuffix("/v1"), share
