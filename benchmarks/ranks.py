"""Two workers that share each layer against one, all with one thread.

    python benchmarks/ranks.py [--rounds 5]

A Llama shape of random weights on the CPU, so that both cores of a small machine can work on one
step. The two take turns round by round, so that a busy neighbour slows both alike; the figures are
medians. What gloo's sums cost on this machine is in it: two a layer. Not for: GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from octavo.config import ParallelConfig, WorkerConfig
from octavo.executor.base import Executor
from octavo.executor.local import LocalExecutor
from octavo.executor.remote import RemoteExecutor
from octavo.executor.spawn import LocalCrew
from octavo.types import SAMPLE, Admit, StepPlan, TokenParams, pack

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
BLOCK = 16
PROMPT = 256
DECODES = 8  # rows of a decode step, and how many such steps are timed together


class Runner:
    """One executor, and the time of a step on it."""

    def __init__(self, name: str, executor: Executor) -> None:
        self.name = name
        self.executor = executor
        self.step = 0
        self.prefill: list[float] = []
        self.decode: list[float] = []
        executor.start()

    def run(self) -> None:
        """A prompt, then some steps of several rows."""
        self.prefill.append(self._time(self._prompt()))
        self.decode.append(statistics.median(self._time(self._rows(n)) for n in range(DECODES)))

    def _time(self, plan: StepPlan) -> float:
        began = time.perf_counter()
        self.executor.submit(plan).result()
        return 1e3 * (time.perf_counter() - began)

    def _next(self) -> int:
        self.step += 1
        return self.step

    def _prompt(self) -> StepPlan:
        blocks = PROMPT // BLOCK
        return StepPlan(
            self._next(),
            0,
            slots=pack([0]),
            starts=pack([0]),
            lengths=pack([PROMPT]),
            flags=bytes([SAMPLE]),
            tokens=pack(range(PROMPT)),
            block_rows=pack([0] * blocks),
            block_at=pack(range(blocks)),
            block_ids=pack(range(blocks)),
            admits=(Admit(0, PROMPT, TokenParams(max_tokens=9, temperature=0.0)),),
        )

    def _rows(self, number: int) -> StepPlan:
        rows = range(1, 1 + DECODES)
        params = TokenParams(max_tokens=99, temperature=0.0)
        first = number == 0
        return StepPlan(
            self._next(),
            0,
            slots=pack(rows),
            starts=pack([number] * DECODES),
            lengths=pack([1] * DECODES),
            flags=bytes([SAMPLE] * DECODES),
            tokens=pack(rows),
            block_rows=pack(range(DECODES)) if first else b"",
            block_at=pack([0] * DECODES) if first else b"",
            block_ids=pack(range(50, 50 + DECODES)) if first else b"",
            admits=tuple(Admit(slot, 1, params) for slot in rows) if first else (),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="two workers against one")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))

        def config(parallel: ParallelConfig) -> WorkerConfig:
            return WorkerConfig(
                folder,
                load_format="dummy",
                max_num_seqs=16,
                num_blocks=200,
                threads=1,
                block_size=BLOCK,
                parallel=parallel,
            )

        two = ParallelConfig(2, 1, "mp")
        runners = [
            Runner("one worker", LocalExecutor(config(ParallelConfig()))),
            Runner("two workers", RemoteExecutor(config(two), LocalCrew(two), parent=os.getpid())),
        ]
        try:
            for _ in range(rounds):
                for runner in runners:
                    runner.run()
        finally:
            for runner in runners:
                runner.executor.close()
    one, other = runners
    for name in ("prefill", "decode"):
        times = [statistics.median(getattr(runner, name)) for runner in runners]
        ratios = [a / b for a, b in zip(getattr(one, name), getattr(other, name), strict=True)]
        print(
            f"{name}: {one.name} {times[0]:.1f} ms, {other.name} {times[1]:.1f} ms; "
            f"speed-up {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
