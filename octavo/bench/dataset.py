"""The prompts of a benchmark: synthetic ones of exact length, or those of a file.

Not for: sending them (`client.py`). Lengths are in tokens of the server's own tokenizer where a
tokenizer is at hand; random prompts are token ids, so their length is exact either way.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from octavo.errors import ConfigError

DATASETS = ("random", "sharegpt", "custom", "prefix_repetition")


class Encoder(Protocol):
    """What counting needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: its prompt, how long that is, and how much output is asked for."""

    prompt: str | list[int]
    prompt_len: int
    output_len: int


Rows: TypeAlias = list[dict[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags that choose and shape the data set."""
    group = parser.add_argument_group("data set")
    group.add_argument("--dataset-name", choices=DATASETS, default="random")
    group.add_argument("--dataset-path", type=Path, help="file of sharegpt or custom")
    group.add_argument("--num-prompts", type=int, default=1000)
    group.add_argument("--input-len", type=int, help="same as --random-input-len")
    group.add_argument("--output-len", type=int, help="same as --random-output-len")
    group.add_argument("--random-input-len", type=int, default=1024)
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument(
        "--random-range-ratio",
        type=float,
        default=0.0,
        help="lengths are drawn from LEN*(1-R) to LEN*(1+R)",
    )
    group.add_argument(
        "--random-prefix-len", type=int, default=0, help="tokens that all prompts share"
    )
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    group.add_argument("--prefix-repetition-output-len", type=int, default=128)
    group.add_argument("--sharegpt-output-len", type=int)
    group.add_argument("--custom-output-len", type=int, default=256)


def samples(args: argparse.Namespace, tokenizer: Encoder) -> list[Sample]:
    """The requests that the flags ask for, the same for the same seed. Raises ConfigError."""
    if args.num_prompts < 1:
        raise ConfigError("--num-prompts must be at least 1.", "num_prompts")
    rnd = random.Random(args.seed)
    if args.dataset_name == "random":
        return _random(args, tokenizer, rnd)
    if args.dataset_name == "prefix_repetition":
        return _prefix_repetition(args, tokenizer, rnd)
    if args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path FILE.")
    found = (_sharegpt if args.dataset_name == "sharegpt" else _custom)(args, tokenizer)
    rnd.shuffle(found)
    if not found:
        raise ConfigError(f"{args.dataset_path} holds no usable prompt.", "dataset_path")
    return [found[index % len(found)] for index in range(args.num_prompts)]


def _random(args: argparse.Namespace, tokenizer: Encoder, rnd: random.Random) -> list[Sample]:
    prompt_len = args.input_len or args.random_input_len
    output_len = args.output_len or args.random_output_len
    ratio = args.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio {ratio} must be from 0 to below 1.")

    def around(length: int) -> int:
        return max(1, rnd.randint(int(length * (1 - ratio)), int(length * (1 + ratio))))

    prefix = _ids(rnd, tokenizer, args.random_prefix_len)
    found = []
    for _ in range(args.num_prompts):
        ids = prefix + _ids(rnd, tokenizer, around(prompt_len))
        found.append(Sample(ids, len(ids), around(output_len)))
    return found


def _prefix_repetition(
    args: argparse.Namespace, tokenizer: Encoder, rnd: random.Random
) -> list[Sample]:
    length = args.prefix_repetition_prefix_len
    prefixes = [
        _ids(rnd, tokenizer, length) for _ in range(max(1, args.prefix_repetition_num_prefixes))
    ]
    found = []
    for index in range(args.num_prompts):
        suffix = _ids(rnd, tokenizer, args.prefix_repetition_suffix_len)
        ids = prefixes[index % len(prefixes)] + suffix
        found.append(Sample(ids, len(ids), args.prefix_repetition_output_len))
    return found


def _ids(rnd: random.Random, tokenizer: Encoder, count: int) -> list[int]:
    # The first ids of most vocabularies are control tokens; they would end or bend an answer.
    first = min(256, tokenizer.vocab_size // 2)
    return [rnd.randrange(first, tokenizer.vocab_size) for _ in range(count)]


def _sharegpt(args: argparse.Namespace, tokenizer: Encoder) -> list[Sample]:
    """First question and first answer of each conversation, as the well-known file holds them."""
    found = []
    for row in _read_json(args.dataset_path):
        turns = row.get("conversations") or row.get("conversation") or []
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        prompt_len = len(tokenizer.encode(question))
        output_len = args.sharegpt_output_len or len(tokenizer.encode(answer, False))
        if 4 <= prompt_len <= 1024 and output_len >= 4 and prompt_len + output_len <= 2048:
            found.append(Sample(question, prompt_len, output_len))
    return found


def _custom(args: argparse.Namespace, tokenizer: Encoder) -> list[Sample]:
    """JSON lines with `prompt` and, if wanted, `output_tokens`."""
    found = []
    for number, line in enumerate(_read_text(args.dataset_path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt = row["prompt"]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(
                f"{args.dataset_path} line {number} is not a JSON object with a prompt."
            ) from None
        length = row.get("output_tokens") or args.output_len or args.custom_output_len
        if type(length) is not int or length < 1:
            raise ConfigError(
                f"{args.dataset_path} line {number}: output_tokens = {length!r} must be a whole "
                "number from 1.",
                "dataset_path",
            )
        found.append(Sample(str(prompt), len(tokenizer.encode(str(prompt))), length))
    return found


def _read_json(path: Path) -> Rows:
    try:
        rows = json.loads(_read_text(path))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.", "dataset_path") from None
    if not isinstance(rows, list):
        raise ConfigError(f"{path} must hold a list of conversations.", "dataset_path")
    return [row for row in rows if isinstance(row, dict)]


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}.", "dataset_path") from None
