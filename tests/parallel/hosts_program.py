"""Answers over two stages in the Ray cluster at an address, and prints them as a line of JSON.

python -m tests.parallel.hosts_program MODEL ADDRESS
"""

from __future__ import annotations

import json
import sys

from octavo import LLM, SamplingParams

PROMPTS = ["The capital of France is", "def fib(n):"]


def main() -> None:
    llm = LLM(
        sys.argv[1],
        dtype="float32",
        device="cpu",
        max_model_len=512,
        pipeline_parallel_size=1 if sys.argv[2] == "alone" else 2,
        distributed_executor_backend="uni" if sys.argv[2] == "alone" else "ray",
        ray_address=None if sys.argv[2] == "alone" else sys.argv[2],
    )
    outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=10, temperature=0), use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    print(json.dumps({"tokens": tokens, "notes": llm.llm_engine.info.notes}))
    llm.shutdown()


if __name__ == "__main__":
    main()
