"""`octavo pull`: fetches a small model. Not for: how that is done (`pulling.py`)."""

from __future__ import annotations

import argparse

from octavo.options import DEFAULT_MODEL, EngineArgs

EPILOG = """
examples:
  octavo pull                                   SmolLM2-135M-Instruct, 98 MB
  octavo pull smollm2-135m --download-dir /models

The file's SHA-256 is checked. An interrupted download starts cleanly the next time.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's name and the cache folder."""
    parser.epilog = EPILOG
    parser.add_argument("name", nargs="?", default=DEFAULT_MODEL, metavar="NAME")
    parser.add_argument(
        "--download-dir",
        metavar="DIR",
        help="cache folder instead of ~/.cache/octavo [OCTAVO_CACHE_DIR]",
    )


def run(args: argparse.Namespace) -> int:
    """Fetches the model unless it is there, and prints its path."""
    options = EngineArgs(download_dir=args.download_dir) if args.download_dir else EngineArgs()
    from octavo.pulling import pull_with_bar

    print(pull_with_bar(args.name, options))
    return 0
