"""`octavo lint`: what is wrong with manifests, commands, dashboards and specs before they run.

Not for: the rules (`octavo/platform/`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from octavo.errors import ConfigError

EPILOG = """
examples:
  octavo lint deploy/                       manifests, dashboards, alerts, scripts, Markdown
  octavo lint cluster.toml                  a spec, and whether its model fits
  octavo lint out/ --crds kuberay/crds      custom resources against their definitions
  octavo lint grafana/ --metrics http://engine:8000/metrics

The exit code is 1 if there is an error.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Paths, and what to hold them against."""
    parser.epilog = EPILOG
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files and folders")
    parser.add_argument("--crds", metavar="DIR", help="folder of custom resource definitions")
    parser.add_argument(
        "--metrics", metavar="URL|FILE", help="metrics to check names against; Octavo's own if not"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON list")


def run(args: argparse.Namespace) -> int:
    """Prints a line a finding; 1 if there is an error."""
    from octavo.platform.lint import LintOptions, lint

    metrics = None if args.metrics is None else exposition(args.metrics)
    options = LintOptions(Path(args.crds) if args.crds else None, metrics)
    found = lint([Path(path) for path in args.paths], options)
    errors = sum(finding.level == "error" for finding in found)
    if args.json:
        print(json.dumps([asdict(finding) for finding in found], indent=2))
    else:
        for finding in found:
            print(finding)
        print(f"{errors} errors, {len(found) - errors} warnings")
    return 1 if errors else 0


def exposition(place: str) -> str:
    """What /metrics answers, or answered. Raises ConfigError."""
    if place.startswith(("http://", "https://")):
        import httpx

        try:
            return httpx.get(place, timeout=10).raise_for_status().text
        except httpx.HTTPError as error:
            raise ConfigError(f"--metrics {place}: {error}", "metrics") from None
    try:
        return Path(place).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--metrics {place}: {error}", "metrics") from None
