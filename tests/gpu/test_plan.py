"""On a GPU the cache that a worker takes is the one that was planned, within 2 %."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from octavo.options import EngineArgs
from octavo.plan.forecast import Question, make_plan
from octavo.plan.shapes import SHAPES
from octavo.resolve import worker_config
from octavo.worker.worker import Worker

LLAMA = dict(SHAPES["meta-llama/Llama-3.1-8B-Instruct"])
LATENT = {
    **SHAPES["deepseek-ai/DeepSeek-V2"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1408,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-8b": (LLAMA, {}),
    "llama-8b-fp8": (LLAMA, {"kv_cache_dtype": "fp8", "quantization": "fp8"}),
    "half-as-deep": ({**LLAMA, "num_hidden_layers": 16}, {"max_num_seqs": 64}),
    "latent": (LATENT, {}),
}


def measured(model: str, more: dict[str, Any]) -> tuple[int, int, str]:
    """(blocks planned, blocks taken, the worker's own line about it)."""
    args = EngineArgs(model=model, load_format="dummy", device="cuda", max_model_len=8192, **more)
    planned = make_plan(Question(args))
    info = Worker(worker_config(args)).load()
    line = next(line for line in info.notes if line.startswith("plan: "))
    return planned.blocks, info.num_blocks, line


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_blocks_are_as_planned(name: str, tmp_path: Path) -> None:
    config, more = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    # A process of its own: its memory is free when it ends.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        planned, taken, line = pool.submit(measured, str(tmp_path), more).result()
    print(name, planned, line)
    assert abs(planned - taken) <= 0.02 * taken
