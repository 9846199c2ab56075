"""Runs the workloads with quantized weights on one GPU, as `workloads.py` does the others.

    python -m benchmarks.gpu.quantized_workloads [--only C,C4,D] [--quick]

C: the Llama-3.3-70B shape in static FP8, as compressed-tensors: first tokens, steps, and 128
requests of 512 tokens in and 256 out. C4: the same shape in AWQ's 4 bits, of which no peer has been
measured. D: the 8B shape in AWQ's 4 bits: steps, first tokens, and A1's 512 requests.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator

from benchmarks.gpu.shapes import LLAMA_8B, equal_requests, requests_of
from benchmarks.gpu.workloads import Engine, Figure, show

AWQ: dict[str, object] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
}
FP8: dict[str, object] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True},
            "input_activations": {"num_bits": 8, "type": "float", "strategy": "tensor"},
        }
    },
}
LLAMA_70B: dict[str, object] = {
    **LLAMA_8B,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
NO_PEER = math.nan


def started(config: dict[str, object], *, length: int, sequences: int) -> Engine:
    engine = Engine(config, max_model_len=length, sequences=sequences)
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in engine.info.timings)
    print(f"ready after {engine.start_seconds:.2f} s: {phases}")
    for note in engine.info.notes:
        print(f"    {note}")
    return engine


def c(quick: bool) -> Iterator[Figure]:
    """70B in 8-bit floats."""
    engine = started({**LLAMA_70B, "quantization_config": FP8}, length=4096, sequences=128)
    for batch, peer, floor in ((1, 19.7, 16.5), (32, 27.1, 18.0)):
        yield Figure(f"C step of {batch}, ms", engine.between_tokens(batch), peer, floor, False)
    for length, peer, floor in ((128, 28.8, 16.5), (1024, 135.1, 99.0)):
        ours = engine.first_token(length)
        yield Figure(f"C first token {length}, ms", ours, peer, floor, False)
    if not quick:
        rate = engine.throughput(equal_requests(128, 512, 256, 128256))
        yield Figure("C output tokens/s", rate, 1916, None, True)
    engine.close()


def c4(quick: bool) -> Iterator[Figure]:
    """70B in 4 bits."""
    engine = started({**LLAMA_70B, "quantization_config": AWQ}, length=4096, sequences=128)
    for batch, floor in ((1, 8.8), (8, 8.8), (32, 8.9)):
        ours = engine.between_tokens(batch)
        yield Figure(f"C4 step of {batch}, ms", ours, NO_PEER, floor, False)
    ours = engine.first_token(128)
    yield Figure("C4 first token 128, ms", ours, NO_PEER, 22.7, False)
    if not quick:
        rate = engine.throughput(equal_requests(128, 512, 256, 128256))
        yield Figure("C4 output tokens/s", rate, NO_PEER, None, True)
    engine.close()


def d(quick: bool) -> Iterator[Figure]:
    """8B in 4 bits."""
    engine = started({**LLAMA_8B, "quantization_config": AWQ}, length=10240, sequences=512)
    steps = ((1, 3.95, 1.2), (8, 4.15, 1.3), (64, 6.60, None), (256, 13.97, None))
    for batch, peer, floor in steps[:3] if quick else steps:
        yield Figure(f"D step of {batch}, ms", engine.between_tokens(batch), peer, floor, False)
    for length, peer in ((128, 9.46), (512, 17.29), (2048, 56.6)):
        ours = engine.first_token(length)
        yield Figure(f"D first token {length}, ms", ours, peer, None, False)
    if not quick:
        rate = engine.throughput(requests_of(512))
        yield Figure("D output tokens/s", rate, 10275, None, True)
    engine.close()


WORKLOADS: dict[str, Callable[[bool], Iterator[Figure]]] = {"C": c, "C4": c4, "D": d}


def main() -> None:
    """Runs what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--only", default="C,C4,D", help="workloads, with commas between")
    parser.add_argument("--quick", action="store_true", help="no throughput, no large batches")
    args = parser.parse_args()
    for name, run in WORKLOADS.items():
        if name in args.only.split(","):
            for figure in run(args.quick):
                print(show(figure), flush=True)


if __name__ == "__main__":
    main()
