"""`octavo render`: a checked deployment out of a spec. Not for: the files (`octavo/platform/`)."""

from __future__ import annotations

import argparse
from pathlib import Path

EPILOG = """
example:
  octavo render --spec cluster.toml --out manifests/
  kubectl apply -f manifests/            after what manifests/NOTES.txt says

Keys of a spec: docs/runbook.md. Nothing is written if the model does not fit or a file has a flaw.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where from and where to."""
    parser.epilog = EPILOG
    parser.add_argument("--spec", required=True, metavar="FILE", help="TOML file of the deployment")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--crds", metavar="DIR", help="check against these definitions as well")


def run(args: argparse.Namespace) -> int:
    """Writes the files and names them."""
    from octavo.platform.render import render, write
    from octavo.platform.spec import read_spec_file

    rendered = render(read_spec_file(args.spec))
    names = write(rendered, Path(args.out), Path(args.crds) if args.crds else None)
    print(rendered.sizes.note)
    for name in names:
        print(f"  {args.out}/{name}")
    return 0
