"""`octavo run`: completes prompts offline and prints what came out.

One prompt prints its text, several print one JSON object a line. Not for: conversations
(`chat.py`), servers (`serve.py`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from octavo.cli.flags import add_config, add_options, engine_args
from octavo.errors import InvalidRequest
from octavo.options import EngineArgs

EPILOG = """
examples:
  octavo run "The capital of France is"
  octavo run --max-tokens 64 --temperature 0.8 --seed 1 "Once upon a time" "It was a dark night"
  octavo run --chat "Name three colours."
  cat prompts.txt | octavo run -                 one prompt a line
  octavo run --input requests.jsonl              {"prompt": "...", "max_tokens": 8} a line

A JSON line may hold any sampling parameter; it wins over the flags.
"""

DEFAULT_MAX_TOKENS = 256

SAMPLING = {
    "max_tokens": (int, "most tokens to generate"),
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "share of probability to sample from"),
    "top_k": (int, "number of tokens to sample from; 0 is all"),
    "n": (int, "choices a prompt"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompts, sampling, and every option of the engine."""
    parser.epilog = EPILOG
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="text; - reads standard input")
    parser.add_argument("--input", metavar="FILE", help="text or JSON lines to read prompts from")
    parser.add_argument("--chat", action="store_true", help="put each prompt as a user's message")
    parser.add_argument("--json", action="store_true", help="print JSON for a single prompt too")
    add_sampling(parser)
    add_config(parser)
    add_options(parser, EngineArgs)


def add_sampling(parser: argparse.ArgumentParser, leave_out: Collection[str] = ()) -> None:
    """Flags for the sampling parameters that people set; `--seed` is the engine's too."""
    group = parser.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING.items():
        if name in leave_out:
            continue
        flag = "--" + name.replace("_", "-")
        group.add_argument(flag, type=kind, default=argparse.SUPPRESS, help=text)
    group.add_argument(
        "--ignore-eos",
        action="store_true",
        default=argparse.SUPPRESS,
        help="go on after the model's end token",
    )
    group.add_argument("--stop", action="append", default=argparse.SUPPRESS, help="text that ends")


def sampling_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameters on the command line."""
    names = {*SAMPLING, "stop", "seed", "ignore_eos"}
    return {name: value for name, value in vars(args).items() if name in names}


def run(args: argparse.Namespace) -> int:
    """Completes all prompts in one batch."""
    items = list(_items(args))
    if not items:
        print("octavo run: no prompt; give one, or - to read standard input.", file=sys.stderr)
        return 2
    options = engine_args(args)

    from msgspec import structs

    from octavo.sampling_params import SamplingParams

    for _, extra in items:
        _params(SamplingParams, dict(extra))  # mistakes show before the model is loaded

    from octavo.llm import LLM

    llm = LLM.from_engine_args(options)
    own = structs.asdict(llm.get_default_sampling_params())
    defaults = {**own, "max_tokens": DEFAULT_MAX_TOKENS, **sampling_flags(args)}
    params = [_params(SamplingParams, {**defaults, **extra}) for _, extra in items]
    texts = [prompt for prompt, _ in items]
    show = sys.stderr.isatty() and len(items) > 1
    if args.chat:
        messages = [[{"role": "user", "content": text}] for text in texts]
        outputs = llm.chat(messages, params, use_tqdm=show)
    else:
        outputs = llm.generate(texts, params, use_tqdm=show)
    _print(texts, outputs, as_json=args.json or len(items) > 1)
    return 0


def _params(kind: type[Any], values: dict[str, Any]) -> Any:
    try:
        return kind(**values)
    except TypeError as error:
        raise InvalidRequest(f"{error} of a request; see the README for those there are.") from None


def _items(args: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(prompt, its own sampling parameters) of everything that was given."""
    for prompt in args.prompts:
        if prompt == "-":
            yield from _lines(sys.stdin, "standard input")
        else:
            yield prompt, {}
    if args.input:
        try:
            with open(args.input, encoding="utf-8") as lines:
                yield from _lines(lines, args.input)
        except OSError as error:
            raise InvalidRequest(f"--input {args.input}: {error.strerror}.", "input") from None


def _lines(lines: Iterable[str], name: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\n")
        if not text.strip():
            continue
        if not text.lstrip().startswith("{"):
            yield text, {}
            continue
        try:
            record = json.loads(text)
            prompt = record.pop("prompt")
        except (json.JSONDecodeError, KeyError):
            raise InvalidRequest(
                f"{name}, line {number}: not a JSON object with a prompt.", "prompt"
            ) from None
        yield prompt, record


def _print(texts: list[str], outputs: Iterable[Any], *, as_json: bool) -> None:
    for prompt, output in zip(texts, outputs, strict=True):
        for choice in output.outputs:
            if not as_json:
                print(choice.text)
                continue
            row = {
                "prompt": prompt,
                "index": choice.index,
                "text": choice.text,
                "finish_reason": choice.finish_reason,
                "prompt_tokens": len(output.prompt_token_ids),
                "completion_tokens": len(choice.token_ids),
            }
            print(json.dumps(row, ensure_ascii=False))
