"""Texts to measure and calibrate number formats on: a person's own, or a few of ours.

Not for: benchmarks of speed (`octavo/bench/dataset.py`).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError

OURS = (
    "The capital of France is Paris, and the river that runs through it is the Seine. In spring "
    "its banks are full of people who read, play music, or watch the boats go by.",
    "Question: A train leaves at nine and travels eighty kilometres an hour. Another leaves an "
    "hour later at a hundred. When does the second one catch up? Answer: Let t be the hours since "
    "nine. Then 80 t = 100 (t - 1), so t = 5, and they meet at two in the afternoon.",
    "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    "
    "return a\n\nprint([fibonacci(i) for i in range(10)])\n",
    "Dear Ms Hansen,\n\nthank you for your letter of the third of March. We have looked into the "
    "matter and found that the parcel was delivered to a neighbour. Please let us know whether "
    "you have received it in the meantime.\n\nKind regards",
    "Water boils at a lower temperature on a mountain, because the pressure of the air above it "
    "is smaller. That is why pasta takes longer to cook in the Alps than at the sea.",
    '{"name": "Ada", "born": 1815, "fields": ["mathematics", "computing"], "alive": false}',
    "Es war einmal ein König, der hatte drei Töchter. Die älteste konnte singen, die zweite "
    "konnte tanzen, und die jüngste wusste auf jede Frage eine Antwort.",
    "To make bread you need flour, water, salt and yeast. Mix them, knead the dough for ten "
    "minutes, let it rest until it has doubled in size, and bake it in a hot oven until the "
    "crust is brown and it sounds hollow when you knock on it.",
)


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Flags that say which texts."""
    parser.add_argument(
        "--prompts", metavar="FILE", help="your own prompts, one a line; a few of ours if left out"
    )
    parser.add_argument(
        "--text", metavar="FILE", help="a longer text, for perplexity, read in windows"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=2048, metavar="N", help="most tokens that are computed"
    )
    parser.add_argument(
        "--window", type=int, default=256, metavar="N", help="most tokens of one text or window"
    )


def token_lists(args: argparse.Namespace, tokenizer: Any, longest: int) -> list[list[int]]:
    """The texts' tokens, none longer than a window or `longest`, at most `max_tokens` in all.

    Raises ConfigError for files that cannot be read and limits that leave nothing.
    """
    if args.window < 2 or args.max_tokens < 2:
        raise ConfigError("--window and --max-tokens must be 2 or more", "window")
    texts = list(OURS)
    if args.prompts:
        texts = [line for line in _read(args.prompts).splitlines() if line.strip()]
    if args.text:
        texts = [*(texts if args.prompts else ()), _read(args.text)]
    lists: list[list[int]] = []
    left = args.max_tokens
    for text in texts:
        ids = list(tokenizer.encode(text).ids)
        window = min(args.window, longest)
        for start in range(0, len(ids), window):
            part = ids[start : start + min(window, left)]
            if len(part) > 1:
                lists.append(part)
                left -= len(part)
    if not lists:
        raise ConfigError("the texts hold no tokens to compare; use --prompts or --text", "prompts")
    return lists


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}", "prompts") from error
