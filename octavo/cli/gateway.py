"""`octavo gateway`: LiteLLM's proxy before engines, out of a spec. Not for: the watch itself."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

EPILOG = """
example of a spec:
  name = "two"
  [model]
  name = "smollm2-135m"
  [gateway]
  port = 4000
  [[gateway.backends]]
  url = "http://127.0.0.1:8001/v1"
  [[gateway.backends]]
  url = "http://127.0.0.1:8002/v1"

  LITELLM_MASTER_KEY=sk-... octavo gateway --spec two.toml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The spec, and where things are."""
    parser.epilog = EPILOG
    parser.add_argument("--spec", required=True, metavar="FILE", help="TOML file of the deployment")
    parser.add_argument("--config-out", metavar="FILE", help="keep LiteLLM's settings there")
    parser.add_argument("--litellm", metavar="PATH", help="LiteLLM's program; on PATH if left out")
    parser.add_argument(
        "--write-only", action="store_true", help="write the settings, start nothing"
    )


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    from octavo.platform.gateway import Gateway, prepare
    from octavo.platform.spec import read_spec_file

    spec = read_spec_file(args.spec)
    launch = prepare(spec, Path(args.config_out) if args.config_out else None, args.litellm)
    say(f"settings: {launch.config}")
    if args.write_only:
        return 0
    gateway = Gateway(launch, drain_seconds=spec.drain.seconds, say=say)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: gateway.stop())
    return gateway.run()


def say(text: str) -> None:
    """A line for the person who watches."""
    print(f"gateway: {text}", file=sys.stderr, flush=True)
