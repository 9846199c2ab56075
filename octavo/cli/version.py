"""`octavo version`."""

from __future__ import annotations

import argparse

from octavo import __version__


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Takes none."""
    parser.epilog = "example:\n  octavo version"


def run(_args: argparse.Namespace) -> int:
    """Prints the version."""
    print(__version__)
    return 0
