"""`octavo bench throughput`: how many tokens a second the engine makes without a server."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from octavo.bench import dataset
from octavo.bench.offline import add_engine, open_engine


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All flags of the benchmark; `--seed` is the engine's and the data set's."""
    group = parser.add_argument_group("benchmark")
    group.add_argument("--n", type=int, default=1, help="choices a prompt")
    group.add_argument("--num-warmups", type=int, default=0)
    group.add_argument("--disable-detokenize", action="store_true")
    group.add_argument("--output-json", type=Path)
    dataset.add_arguments(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Runs the benchmark and prints three lines."""
    from octavo.sampling_params import SamplingParams

    llm = open_engine(args)
    args.seed = vars(args).get("seed", 0)
    samples = dataset.samples(args, llm.get_tokenizer())
    prompts = [sample.prompt for sample in samples]
    params = [
        SamplingParams(
            n=args.n,
            temperature=1.0,
            top_p=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not args.disable_detokenize,
        )
        for sample in samples
    ]
    for _ in range(args.num_warmups):
        llm.generate(prompts[0], params[0], use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    prompt_tokens = sum(len(output.prompt_token_ids or ()) for output in outputs)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    total = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, "
        f"{total / seconds:.2f} total tokens/s, {output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    if args.output_json is not None:
        result = {
            "elapsed_time": seconds,
            "num_requests": len(outputs),
            "total_num_tokens": total,
            "requests_per_second": len(outputs) / seconds,
            "tokens_per_second": total / seconds,
        }
        args.output_json.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
    return 0
