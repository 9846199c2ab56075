"""`octavo route`: a small router over engines. Not for: choosing (`octavo/platform/route.py`)."""

from __future__ import annotations

import argparse

from octavo.errors import ConfigError

EPILOG = """
example:
  octavo route --backend http://127.0.0.1:8001 --backend http://127.0.0.1:8002 --port 4100
"""


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
    """Serves until a signal ends it."""
    import uvicorn

    from octavo.platform.route import Application, Backend

    backends = [Backend(*_parsed(text)) for text in args.backend]
    app = Application(backends).app
    uvicorn.run(app, host=args.host, port=args.port, log_level="warning", access_log=False)
    return 0


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
