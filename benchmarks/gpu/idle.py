"""How busy the GPU is in decode steps, and which kernels they consist of.

    python -m benchmarks.gpu.idle [--model 8b|0.6b] [--batches 1,8,64] [--prefills 128,512]

With torch's profiler over 40 steps in the middle of a run. Idle is the share of time in which no
kernel or copy runs. Prefills are of one prompt alone.
"""

from __future__ import annotations

import argparse
from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.shapes import LLAMA_8B, QWEN3_06B
from benchmarks.gpu.workloads import Engine

STEPS = 40


def spans(record: profile) -> list[tuple[float, float, str]]:
    """(start, end, name) in microseconds of all that ran on the GPU, in order."""
    found = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in record.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "#" not in event.name
    ]
    return sorted(found)


def report(title: str, found: list[tuple[float, float, str]], steps: int, top: int) -> None:
    """Prints busy and idle time, the kernels, and after which of them the GPU waited."""
    busy, end, total = 0.0, found[0][0], found[-1][1] - found[0][0]
    kernels: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    last = ""
    for start, stop, name in found:
        if start > end:
            waits[f"{last[:40]} -> {name[:40]}"] += start - end
        busy += max(0.0, stop - max(start, end))
        end, last = max(end, stop), name
        kernels[name] += stop - start
        counts[name] += 1
    print(
        f"{title}: {total / steps / 1000:.3f} ms a step, idle {100 * (1 - busy / total):.1f} %, "
        f"{len(found) / steps:.0f} launches"
    )
    for name, time in kernels.most_common(top):
        print(f"    {time / steps:9.1f} us {counts[name] / steps:7.1f} x  {name[:90]}")
    for name, time in waits.most_common(8):
        print(f"    {time / steps:9.1f} us idle  {name}")


def decode(engine: Engine, batch: int, prompt: int, top: int) -> None:
    """Steps of `batch` sequences."""
    for _ in range(batch):
        engine.add(engine.prompt(prompt), 200)
    core = engine.core
    for _ in range(60 + batch // 8):
        core.step()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        for _ in range(STEPS):
            core.step()
        torch.cuda.synchronize()
    report(f"decode {batch}", spans(record), STEPS, top)
    engine.finish()


def prefill(engine: Engine, prompt: int, top: int) -> None:
    """One prompt alone."""
    for _ in range(3):
        engine.add(engine.prompt(prompt), 1)
        engine.finish()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        engine.add(engine.prompt(prompt), 1)
        engine.finish()
        torch.cuda.synchronize()
    report(f"prefill {prompt}", spans(record), 1, top)


def main() -> None:
    """Reads the options and prints."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="8b", choices=("8b", "0.6b"))
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--prefills", default="")
    parser.add_argument("--prompt", type=int, default=448)
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args()
    engine = Engine(LLAMA_8B if args.model == "8b" else QWEN3_06B, max_model_len=10240)
    for length in filter(None, args.prefills.split(",")):
        prefill(engine, int(length), args.top)
    for batch in filter(None, args.batches.split(",")):
        decode(engine, int(batch), args.prompt, args.top)


if __name__ == "__main__":
    main()
