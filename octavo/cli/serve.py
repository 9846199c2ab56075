"""`octavo serve`: the HTTP server. Not for: what happens after the options (`launch.py`)."""

from __future__ import annotations

import argparse
import sys

from octavo import log
from octavo.cli.flags import add_config, add_model, add_options, engine_args, server_args, table
from octavo.options import EngineArgs, ServerArgs

EPILOG = """
examples:
  octavo serve                                  the small model that `octavo pull` fetches
  octavo serve ./Llama-3.2-1B --port 9000       a folder with config.json and safetensors
  octavo serve ./model.gguf --max-model-len auto
  octavo serve --config server.toml             flags win over variables, variables over the file

Variables are named in brackets. `GET /health/ready` says when the model is loaded.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Every option of engine and server."""
    parser.epilog = EPILOG
    add_model(parser)
    add_config(parser)
    add_options(parser, EngineArgs, ServerArgs)


def run(args: argparse.Namespace) -> int:
    """Serves until a signal ends it."""
    engine, server = engine_args(args), server_args(args)
    rows = [*engine.effective(), *server.effective()]
    if server.log_level != "debug":
        rows = [row for row in rows if row[2] != "default"]
    if rows:
        print(f"options:\n{table(rows)}", file=sys.stderr, flush=True)

    log.setup(server.log_level)

    from octavo import launch

    return int(launch.serve(engine, server))
