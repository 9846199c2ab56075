"""Loads one engine through the `LLM` class and runs cells on command: one JSON line in, one out.

Both engines have the same Python names, so one file serves for either:
    python benchmarks/runner.py octavo '{"model": "FOLDER", "dtype": "bfloat16"}'
Started by `versus.py`; not meant to be run by hand.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import sys
import time
from typing import Any

VOCABULARY = range(20, 49_151)


def prompt(rnd: random.Random, length: int) -> dict[str, list[int]]:
    """Random token ids, so that no prefix is shared and no tokenizer is timed."""
    return {"prompt_token_ids": [rnd.choice(VOCABULARY) for _ in range(length)]}


class Cells:
    """The measurements; each gives one number."""

    def __init__(self, module: Any, arguments: dict[str, Any]) -> None:
        self._params = module.SamplingParams
        self._llm = module.LLM(**arguments)
        self._count = 0

    def _run(self, prompts: list[dict[str, list[int]]], lengths: list[int]) -> float:
        params = [
            self._params(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        for output, length in zip(outputs, lengths, strict=True):
            got = len(output.outputs[0].token_ids)
            if got != length:
                raise RuntimeError(f"asked for {length} tokens and got {got}")
        return seconds

    def _random(self) -> random.Random:
        self._count += 1
        return random.Random(self._count)

    def throughput(self, requests: int) -> float:
        """Workload (a): output tokens a second, all requests submitted at once."""
        rnd = random.Random(0)
        prompts, lengths = [], []
        for _ in range(requests):
            size, output = rnd.randint(32, 256), rnd.randint(32, 128)
            prompts.append({"prompt_token_ids": [rnd.randint(20, 49_151) for _ in range(size)]})
            lengths.append(output)
        return sum(lengths) / self._run(prompts, lengths)

    def first_token(self, length: int) -> float:
        """Milliseconds from call to the first token of a lone prompt; best of none, median of 5."""
        times = sorted(self._run([prompt(self._random(), length)], [1]) for _ in range(5))
        return 1000 * times[2]

    def between_tokens(self, batch: int) -> float:
        """Milliseconds a decode step: 97 tokens less 1, over 96, prompts of 32 tokens."""
        prompts = [prompt(self._random(), 32) for _ in range(batch)]
        short = self._run(prompts, [1] * batch)
        prompts = [prompt(self._random(), 32) for _ in range(batch)]
        return 1000 * (self._run(prompts, [97] * batch) - short) / 96


def main() -> None:
    """Answers cells until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints goes to the log, not among the answers
    start = time.perf_counter()
    cells = Cells(importlib.import_module(sys.argv[1]), json.loads(sys.argv[2]))
    print(json.dumps({"load_s": time.perf_counter() - start}), file=replies, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        value = getattr(cells, command["cell"])(*command["args"])
        print(json.dumps({"value": value}), file=replies, flush=True)


if __name__ == "__main__":
    main()
