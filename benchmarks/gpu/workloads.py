"""Runs the workloads of one GPU and prints peer, floor, ours and the ratio of each figure.

    python benchmarks/gpu/workloads.py [--only A1,A3,B,E,M] [--json FILE] [--quick]

Drives the engine core with token ids, without tokenizer or HTTP; weights are random. A1: 512
requests of 100 to 1,024 tokens in and out, 8B shape in bf16, output tokens a second. A2: the same
model, time to the first token of one request alone (3 warm-ups, the median of 10), and the time
between steps in which every sequence of a batch gets a token (prompts of 448 tokens, 128 outputs,
the second of two passes, the median). A3: as A1 with an FP8 cache. B: the 0.6B shape, 256 requests.
E: the DeepSeek-V2-Lite shape, 256 requests of 512 tokens in and 256 out. M: steps of the
Qwen3-30B-A3B shape. Floors of E's and M's steps are what their bytes take at a copy's rate, 4.27
TB/s: weights, as many experts as uniform choices touch, and 512 tokens of cache a row.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.shapes import (
    DEEPSEEK_V2_LITE,
    LLAMA_8B,
    QWEN3_06B,
    QWEN3_30B_A3B,
    Draw,
    equal_requests,
    requests_of,
)
from octavo.config import SchedulerConfig, WorkerConfig
from octavo.core import build_core
from octavo.engine.core import EngineCore
from octavo.types import AddRequest, TokenParams

BATCHED_TOKENS = 16384
SEQUENCES = 512
TEMPERATURE = 0.6
PROMPT, OUTPUT = 448, 128  # of the steps that are timed


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure beside what others reach; `more` says that more is better."""

    name: str
    ours: float
    peer: float
    floor: float | None
    more: bool

    @property
    def ratio(self) -> float:
        """Above 1 is better than the peer."""
        return self.ours / self.peer if self.more else self.peer / self.ours


class Engine:
    """A core with random weights, and requests put to it."""

    def __init__(
        self,
        config: dict[str, object],
        *,
        max_model_len: int,
        cache: str = "auto",
        sequences: int = SEQUENCES,
    ) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(config))
        worker = WorkerConfig(
            model=str(folder),
            device="cuda",
            load_format="dummy",
            dtype="bfloat16",
            kv_cache_dtype=cache,
            max_model_len=max_model_len,
            max_num_seqs=sequences,
            max_num_batched_tokens=BATCHED_TOKENS,
            cache_dir=str(Path(tempfile.gettempdir()) / "octavo"),
        )
        scheduler = SchedulerConfig(0, 0, 0, sequences, BATCHED_TOKENS, prefix_caching=False)
        started = time.perf_counter()
        self.core: EngineCore
        self.core, self.info = build_core(worker, scheduler, lambda _: None)
        self.start_seconds = time.perf_counter() - started
        self._source = random.Random(1)
        self.vocabulary = int(str(config["vocab_size"]))
        self._count = 0

    def add(self, prompt: list[int], output: int) -> str:
        """A request that ends after `output` tokens."""
        self._count += 1
        params = TokenParams(output, temperature=TEMPERATURE, seed=self._count)
        self.core.add(AddRequest(str(self._count), prompt, params, time.monotonic()))
        return str(self._count)

    def prompt(self, length: int) -> list[int]:
        """Fresh random tokens."""
        return [self._source.randrange(self.vocabulary) for _ in range(length)]

    def finish(self) -> int:
        """Serves all that was added; the number of tokens given."""
        tokens = 0
        while self.core.has_work():
            news = self.core.step()
            tokens += sum(len(output.new_ids) for output in news.outputs) if news else 0
        return tokens

    def close(self) -> None:
        """Frees the GPU."""
        self.core.close()

    def throughput(self, draws: list[Draw]) -> float:
        """Output tokens a second."""
        self.add(self.prompt(300), 20)
        self.finish()
        started = time.perf_counter()
        for draw in draws:
            self.add(draw.prompt, draw.output)
        tokens = self.finish()
        seconds = time.perf_counter() - started
        assert tokens == sum(draw.output for draw in draws)
        return tokens / seconds

    def first_token(self, length: int) -> float:
        """Milliseconds."""
        times = []
        for _ in range(13):
            prompt = self.prompt(length)
            started = time.perf_counter()
            self.add(prompt, 1)
            self.finish()
            times.append(1000 * (time.perf_counter() - started))
        return statistics.median(times[3:])

    def between_tokens(self, batch: int) -> float:
        """Milliseconds between steps that give every sequence a token."""
        for _ in range(2):
            for _ in range(batch):
                self.add(self.prompt(PROMPT), OUTPUT)
            times = self._full_steps(batch)
        return statistics.median(times)

    def _full_steps(self, batch: int) -> list[float]:
        times: list[float] = []
        last, was_full = time.perf_counter(), False
        while self.core.has_work():
            news = self.core.step()
            now = time.perf_counter()
            full = news is not None and sum(bool(o.new_ids) for o in news.outputs) == batch
            if full and was_full:
                times.append(1000 * (now - last))
            last, was_full = now, full
        return times


def a1(quick: bool) -> list[Figure]:
    """8B bf16, 512 requests; first tokens and steps."""
    engine = _started(Engine(LLAMA_8B, max_model_len=10240))
    figures = _latency_8b(engine, quick)
    if not quick:
        rate = engine.throughput(requests_of(512))
        figures.append(Figure("A1 output tokens/s", rate, 11100, None, True))
    engine.close()
    return figures


def _latency_8b(engine: Engine, quick: bool) -> list[Figure]:
    figures = []
    firsts = ((128, 10.27, None), (512, 16.21, 9.1), (2048, 54.3, 37.6), (8192, 221.1, 167.0))
    for length, peer, floor in firsts:
        ours = engine.first_token(length)
        figures.append(Figure(f"A2 first token {length}, ms", ours, peer, floor, False))
    steps = ((1, 4.95, 3.5), (8, 5.16, 3.6), (64, 6.61, 4.5), (256, 13.48, 8.9), (512, 24.0, 17.7))
    for batch, peer, floor in steps[:3] if quick else steps:
        ours = engine.between_tokens(batch)
        figures.append(Figure(f"A2 step of {batch}, ms", ours, peer, floor, False))
    return figures


def a3(_: bool) -> list[Figure]:
    """8B with an FP8 cache, 512 requests."""
    engine = _started(Engine(LLAMA_8B, max_model_len=10240, cache="fp8_e4m3"))
    figures = [Figure("A3 output tokens/s", engine.throughput(requests_of(512)), 11820, None, True)]
    engine.close()
    return figures


def b(quick: bool) -> list[Figure]:
    """0.6B bf16, 256 requests."""
    engine = _started(Engine(QWEN3_06B, max_model_len=4096))
    figures = [Figure("B first token 512, ms", engine.first_token(512), 11.55, None, False)]
    for batch, peer, floor in ((1, 1.76, 0.28), (64, 2.87, None)):
        ours = engine.between_tokens(batch)
        figures.append(Figure(f"B step of {batch}, ms", ours, peer, floor, False))
    if not quick:
        rate = engine.throughput(requests_of(256))
        figures.append(Figure("B output tokens/s", rate, 23540, None, True))
    engine.close()
    return figures


def e(quick: bool) -> list[Figure]:
    """DeepSeek-V2-Lite shape in bf16, 256 requests of 512 tokens in and 256 out."""
    engine = _started(Engine(DEEPSEEK_V2_LITE, max_model_len=4096, sequences=256))
    figures = []
    steps = ((1, 3.40, 1.15), (8, 6.86, 4.22), (64, 10.59, 7.48), (256, 12.76, 8.21))
    for batch, peer, floor in steps[:3] if quick else steps:
        ours = engine.between_tokens(batch)
        figures.append(Figure(f"E step of {batch}, ms", ours, peer, floor, False))
    for length, peer in ((128, 14.87), (512, 17.16), (2048, 48.9)):
        ours = engine.first_token(length)
        figures.append(Figure(f"E first token {length}, ms", ours, peer, None, False))
    if not quick:
        rate = engine.throughput(equal_requests(256, 512, 256, engine.vocabulary))
        figures.append(Figure("E output tokens/s", rate, 13500, None, True))
    engine.close()
    return figures


def m(quick: bool) -> list[Figure]:
    """Qwen3-30B-A3B shape in bf16: steps, beside nothing but their floors."""
    engine = _started(Engine(QWEN3_30B_A3B, max_model_len=4096, sequences=256))
    figures = []
    steps = ((1, 1.44), (8, 6.15), (64, 14.69), (256, 17.17))
    for batch, floor in steps[:3] if quick else steps:
        ours = engine.between_tokens(batch)
        figures.append(Figure(f"M step of {batch}, ms", ours, 0.0, floor, False))
    engine.close()
    return figures


WORKLOADS: tuple[tuple[str, Callable[[bool], list[Figure]]], ...] = (
    ("A1", a1),
    ("A3", a3),
    ("B", b),
    ("E", e),
    ("M", m),
)


def _started(engine: Engine) -> Engine:
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in engine.info.timings)
    print(f"ready after {engine.start_seconds:.2f} s: {phases}")
    for note in engine.info.notes:
        print(f"    {note}")
    return engine


def show(figure: Figure) -> str:
    """One line of the table."""
    floor = "-" if figure.floor is None else f"{figure.floor:.2f}"
    return (
        f"{figure.name:<28} peer {figure.peer:>10.2f}  floor {floor:>8}  "
        f"ours {figure.ours:>10.2f}  {figure.ratio:.2f}x"
    )


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--only", default="A1,A3,B", help="workloads, with commas between")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--quick", action="store_true", help="no throughput, no large batches")
    args = parser.parse_args()
    figures: list[Figure] = []
    for name, run in WORKLOADS:
        if name in args.only.split(","):
            for figure in run(args.quick):
                print(show(figure), flush=True)
                figures.append(figure)
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
