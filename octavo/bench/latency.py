"""`octavo bench latency`: how long one batch of requests takes from first to last token."""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path

from octavo.bench.offline import add_engine, open_engine
from octavo.errors import ConfigError
from octavo.fields import flag_of

PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark; prefix caching is off unless it is asked for."""
    group = parser.add_argument_group("benchmark")
    group.add_argument("--input-len", type=int, default=32)
    group.add_argument("--output-len", type=int, default=128)
    group.add_argument("--batch-size", type=int, default=8)
    group.add_argument("--n", type=int, default=1, help="choices a prompt")
    group.add_argument("--num-iters-warmup", type=int, default=10)
    group.add_argument("--num-iters", type=int, default=30)
    group.add_argument("--disable-detokenize", action="store_true")
    group.add_argument("--output-json", type=Path)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints the average and percentiles."""
    import numpy as np
    from rich.console import Console
    from rich.progress import track

    from octavo.sampling_params import SamplingParams

    for name in ("input_len", "output_len", "batch_size", "num_iters"):
        if vars(args)[name] < 1:
            raise ConfigError(f"{flag_of(name)} must be at least 1.", name)
    if "enable_prefix_caching" not in vars(args):
        args.enable_prefix_caching = False
    llm = open_engine(args)
    rnd = random.Random(vars(args).get("seed", 0))
    vocabulary = llm.get_tokenizer().vocab_size
    prompts = [
        [rnd.randrange(vocabulary // 2, vocabulary) for _ in range(args.input_len)]
        for _ in range(args.batch_size)
    ]
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not args.disable_detokenize,
    )
    console = Console(file=sys.stderr)
    latencies = []
    iterations = range(args.num_iters_warmup + args.num_iters)
    for index in track(iterations, "Iterations", console=console, transient=True):
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if index >= args.num_iters_warmup:
            latencies.append(time.perf_counter() - start)
    print(f"Avg latency: {np.mean(latencies)} seconds")
    percentiles = {str(p): float(np.percentile(latencies, p)) for p in PERCENTILES}
    for name, value in percentiles.items():
        print(f"{name}% percentile latency: {value} seconds")
    if args.output_json is not None:
        result = {
            "model_id": llm.model,
            "avg_latency": float(np.mean(latencies)),
            "latencies": latencies,
            "percentiles": percentiles,
        }
        args.output_json.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    return 0
