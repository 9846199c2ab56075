"""The command `octavo`: finds the subcommand, runs it, turns errors into exit codes.

0 is success, 1 an error at start or while running (one sentence on stderr), 2 a command line that
cannot be understood, 130 an interruption. Not for: what a subcommand does (its own module).
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

from octavo import __version__
from octavo.cli.flags import Parser, suggest
from octavo.errors import OctavoError

# name -> (module, one line of help)
COMMANDS: Final = {
    "serve": ("octavo.cli.serve", "serve a model over HTTP, in OpenAI's API"),
    "chat": ("octavo.cli.chat", "chat with a model in the terminal, or ask one question"),
    "run": ("octavo.cli.run", "complete prompts from the command line, a file or a pipe"),
    "pull": ("octavo.cli.pull", "fetch a small model into the cache folder"),
    "bench serve": ("octavo.cli.bench", "measure a server"),
    "bench throughput": ("octavo.cli.bench", "measure offline throughput"),
    "bench latency": ("octavo.cli.bench", "measure the latency of one batch"),
    "bench startup": ("octavo.cli.bench", "measure a start, phase by phase"),
    "kernels": ("octavo.cli.kernels", "build kernels ahead of a start, or list them"),
    "quantize": ("octavo.cli.quantize", "write a model with weights of 8 or 4 bits"),
    "quant-check": ("octavo.cli.check", "measure what quantized weights cost in accuracy"),
    "kv-check": ("octavo.cli.check", "measure what a smaller KV cache costs in accuracy"),
    "plan": ("octavo.cli.plan", "say if a model fits and what it holds, before it is loaded"),
    "lint": ("octavo.cli.lint", "find flaws in manifests, commands, dashboards and specs"),
    "render": ("octavo.cli.render", "write a deployment's manifests out of one spec"),
    "gateway": ("octavo.cli.gateway", "run LiteLLM's proxy before several engines"),
    "route": ("octavo.cli.route", "spread requests over engines by what they have to do"),
    "doctor": ("octavo.cli.doctor", "show what this machine offers, and what is missing"),
    "version": ("octavo.cli.version", "print the version"),
}

EXAMPLES: Final = """
examples:
  octavo chat "What is the capital of France?"     fetches a small model the first time
  octavo serve                                     the same model on http://localhost:8000
  octavo serve ./my-model --port 9000              a folder with config.json and weights
  octavo bench serve --num-prompts 20 --input-len 128 --output-len 32

`octavo COMMAND --help` explains a command.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (that of the process if none is given) and gives its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except OctavoError as error:
        print(f"octavo: {error.message}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # nobody reads on; the interpreter must not complain about it either
        return 1
    except SystemExit as stop:  # argparse's way to end, after help and usage errors
        return stop.code if isinstance(stop.code, int) else 2


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if words else 2
    if words[0] in ("-v", "--version"):
        words[0] = "version"
    name, rest = words[0], words[1:]
    if name == "bench":
        if not rest or rest[0] in ("-h", "--help"):
            print(_help("bench "))
            return 0 if rest else 2
        name, rest = f"bench {rest[0]}", rest[1:]
    if name not in COMMANDS:
        print(f"octavo: {suggest(name, list(COMMANDS))}", file=sys.stderr)
        return 2
    if name == "serve":  # until it can drain there is nothing to drain
        signal.signal(signal.SIGTERM, _stop_at_once)
    module = importlib.import_module(COMMANDS[name][0])
    parser = Parser(name, COMMANDS[name][1])
    if name.startswith("bench "):
        return int(module.run(parser, name.removeprefix("bench "), rest))
    module.add_arguments(parser)
    return int(module.run(parser.parse(rest)))


def _stop_at_once(_number: int, _frame: object) -> NoReturn:
    # Not by an exception: one that is raised in the midst of an import or of a destructor may be
    # caught there. There are no children and no files yet.
    print("octavo: stopped before it served", file=sys.stderr, flush=True)
    os._exit(0)


def _help(prefix: str = "") -> str:
    lines = [f"Octavo {__version__}, an LLM serving engine.", "", "usage: octavo COMMAND ...", ""]
    for name, (_, text) in COMMANDS.items():
        if name.startswith(prefix):
            lines.append(f"  {name:<18}{text}")
    return "\n".join(lines) + "\n" + ("" if prefix else EXAMPLES)


if __name__ == "__main__":
    sys.exit(main())
