"""`octavo chat`: a conversation in the terminal, or one question and its answer.

Not for: where answers come from (`chat_sources.py`: an engine of its own, or a server).
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from octavo.cli.chat_sources import Message, Source, engine_source, server_source
from octavo.cli.flags import add_config, add_options, engine_args, given
from octavo.cli.run import add_sampling, sampling_flags
from octavo.errors import ClientError, ConfigError, OctavoError
from octavo.fields import flag_of
from octavo.options import DEFAULT_MODEL, EngineArgs

EPILOG = """
examples:
  octavo chat "What is the capital of France?"       one answer on standard output
  octavo chat                                        a conversation with the small model
  octavo chat --model ./my-model --system "Answer in rhyme."
  octavo chat --url http://localhost:8000            with the model of a running server

Answers are greedy (--temperature 0) and end at 512 tokens unless flags say otherwise.
In a conversation: /system TEXT sets the instruction, /clear forgets, /exit leaves, /help tells.
"""

COMMANDS = """\
/system TEXT  give the model an instruction; without TEXT, show it
/clear        forget the conversation, keep the instruction
/exit         leave (Ctrl-D does too)
/help         show this
Ctrl-C stops an answer."""

CUT = "the answer was cut at its limit of tokens; --max-tokens N allows more"
SENT = ("model", "seed")  # options of the engine that a server gets with each question
DEFAULTS: Final[dict[str, Any]] = {
    "temperature": 0.0,  # the same question gets the same answer, and small models keep to it
    "max_tokens": 512,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The question, where to ask it, sampling, and every option of the engine."""
    parser.epilog = EPILOG
    parser.add_argument("question", nargs="?", metavar="QUESTION", help="ask this, print, leave")
    parser.add_argument("--prompt", metavar="TEXT", help="the same as QUESTION")
    parser.add_argument("--url", metavar="URL", help="use a running server instead of an engine")
    parser.add_argument("--api-key", metavar="KEY", help="key of that server [OPENAI_API_KEY]")
    parser.add_argument("--system", metavar="TEXT", help="instruction for the model")
    add_sampling(parser, leave_out=("n",))  # a conversation goes on from one answer
    add_config(parser)
    add_options(parser, EngineArgs)


def run(args: argparse.Namespace) -> int:
    """Answers one question, or talks until the person leaves."""
    question = args.prompt if args.prompt is not None else args.question
    sampling = {**DEFAULTS, **sampling_flags(args)}
    source = _source(args, sampling)
    conversation = Conversation(source, args.system)
    try:
        if question is not None:
            conversation.ask(question)
            if source.cut:  # standard output holds the answer alone
                print(f"octavo: {CUT}", file=sys.stderr)
            return 0
        return _talk(conversation, args.url or vars(args).get("model", DEFAULT_MODEL))
    finally:
        source.close()


def _source(args: argparse.Namespace, sampling: dict[str, Any]) -> Source:
    if args.url is not None:
        _refuse_engine_flags(args)
        model = vars(args).get("model")
        return server_source(args.url, model, key=args.api_key, sampling=sampling)
    if args.api_key is not None:
        raise ConfigError("--api-key is for a server; name it with --url.", "api_key")
    return engine_source(engine_args(args), sampling)


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    """With `--url` there is no engine here; a flag of one would change nothing."""
    flags = [flag_of(name) for name in given(args, EngineArgs) if name not in SENT]
    if args.config is not None:
        flags.append("--config")
    if flags:
        raise ConfigError(
            f"{flags[0]} is for an engine of its own; leave it out, or leave --url out.", "url"
        )


@dataclass(slots=True)
class Conversation:
    """Messages so far, and where the next answer comes from."""

    source: Source
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def ask(self, question: str) -> int:
        """Prints the answer as it comes and remembers both; gives the number of pieces.

        A question that failed or was interrupted before any answer is not remembered.
        """
        asked: Message = {"role": "user", "content": question}
        before: list[Message] = []
        if self.system:
            before.append({"role": "system", "content": self.system})
        pieces: list[str] = []
        try:
            for piece in self.source.answer([*before, *self.messages, asked]):
                pieces.append(piece)
                print(piece, end="", flush=True)
        finally:
            if pieces:
                print(flush=True)
                self.messages += [asked, {"role": "assistant", "content": "".join(pieces)}]
        return len(pieces)


def _talk(conversation: Conversation, name: str) -> int:
    from rich.console import Console

    console = Console(highlight=False)
    with _status(console, f"loading {name}"):
        conversation.source.start()
    console.print(f"[bold]Octavo[/bold] with [cyan]{name}[/cyan]. /help lists commands.")
    while True:
        line = _read()
        if line is None or line in ("/exit", "/quit", "/bye"):
            return 0
        if line.startswith("/"):
            console.print(_command(conversation, line), markup=False)
        elif line:
            _turn(conversation, line, console)


def _turn(conversation: Conversation, line: str, console: Any) -> None:
    started = time.monotonic()
    try:
        count = conversation.ask(line)
    except KeyboardInterrupt:
        console.print("[dim](stopped)[/dim]")
    except ClientError as error:
        console.print(f"{error.message} /clear makes room.", style="red", markup=False)
    except OctavoError as error:
        console.print(error.message, style="red", markup=False)
    else:
        seconds = time.monotonic() - started
        if conversation.source.cut:
            console.print(f"[dim]({CUT})[/dim]")
        console.print(f"[dim]{seconds:.1f} s, {count / max(seconds, 1e-9):.0f} pieces/s[/dim]")


def _command(conversation: Conversation, line: str) -> str:
    name, _, rest = line.partition(" ")
    if name == "/clear":
        conversation.messages.clear()
        return "The conversation is forgotten."
    if name == "/system":
        if rest.strip():
            conversation.system = rest.strip()
        return f"Instruction: {conversation.system or 'none'}"
    if name == "/help":
        return COMMANDS
    return f"There is no {name}.\n{COMMANDS}"


def _status(console: Any, text: str) -> Any:
    return console.status(f"[dim]{text}[/dim]")


def _read() -> str | None:
    """One line of the person; None at the end."""
    if sys.stdin.isatty():
        import readline  # noqa: F401  lines can be edited and recalled once it is imported
    try:
        return input("\n> ").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        return ""
