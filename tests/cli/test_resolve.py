"""What options become before and after the worker has started."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.options import EngineArgs
from octavo.resolve import notes, planned_scheduler, worker_config
from octavo.types import WorkerInfo


def info(num_blocks: int = 64, block_size: int = 16, max_model_len: int = 512) -> WorkerInfo:
    return WorkerInfo(
        num_blocks=num_blocks,
        block_size=block_size,
        max_model_len=max_model_len,
        vocab_size=100,
        device="cpu",
        dtype="float32",
        weight_bytes=1,
        kv_bytes=1,
        notes=("attention=native: asked for",),
    )


def test_defaults() -> None:
    worker = worker_config(EngineArgs("folder"), "/path")
    assert worker.model == "/path"
    assert (worker.max_num_batched_tokens, worker.max_num_seqs) == (2048, 128)
    assert worker.max_model_len is None
    assert worker.block_size is None


def test_each_option_reaches_its_record() -> None:
    args = EngineArgs(
        "folder",
        load_format="dummy",
        dtype="half",
        block_size=8,
        max_num_seqs=5,
        max_num_batched_tokens=77,
        num_gpu_blocks_override=9,
        kv_cache_memory_bytes=1 << 20,
        gpu_memory_utilization=0.5,
        attention_backend="sdpa",
        kernels="reference",
        threads=3,
        seed=11,
        hf_overrides={"b": 1, "a": 2},
        enable_prefix_caching=False,
        scheduling_policy="priority",
    )
    worker = worker_config(args)
    assert worker.model == "folder"
    assert (worker.load_format, worker.dtype, worker.block_size) == ("dummy", "float16", 8)
    assert (worker.num_blocks, worker.kv_cache_memory_bytes) == (9, 1 << 20)
    assert (worker.memory_fraction, worker.attention_backend) == (0.5, "sdpa")
    assert (worker.kernels, worker.threads, worker.seed) == ("reference", 3, 11)
    assert worker.hf_overrides == (("a", 2), ("b", 1))
    planned = planned_scheduler(args, worker)
    assert (planned.max_num_seqs, planned.max_num_batched_tokens) == (5, 77)
    assert (planned.prefix_caching, planned.policy) == (False, "priority")


def test_a_small_budget_bounds_the_default_number_of_sequences() -> None:
    assert worker_config(EngineArgs(max_num_batched_tokens=16)).max_num_seqs == 16
    with pytest.raises(ConfigError, match="at least 20"):
        worker_config(EngineArgs(max_num_batched_tokens=16, max_num_seqs=20))


@pytest.mark.parametrize("wanted", ["auto", -1])
def test_context_fitted_to_memory(wanted: int | str) -> None:
    args = EngineArgs(max_model_len=wanted)
    assert worker_config(args).max_model_len == -1
    assert any("max_model_len=512" in line for line in notes(args, info()))


@pytest.mark.parametrize(("wanted", "words"), [(0, "positive"), (4096, "2048")])
def test_contexts_that_cannot_be(wanted: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_config(EngineArgs(max_model_len=wanted), model_max_len=2048)
    assert worker_config(EngineArgs(max_model_len=2048), model_max_len=2048).max_model_len == 2048


def test_without_chunking_a_step_holds_the_longest_prompt() -> None:
    args = EngineArgs(enable_chunked_prefill=False)
    assert worker_config(args, model_max_len=8192).max_num_batched_tokens == 8192
    assert worker_config(args, model_max_len=100).max_num_batched_tokens == 2048
    with pytest.raises(ConfigError, match="--max-num-batched-tokens"):
        worker_config(args)
    tight = EngineArgs(enable_chunked_prefill=False, max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match="512"):
        worker_config(tight, model_max_len=512)
    assert worker_config(tight, model_max_len=100).max_num_batched_tokens == 100


def test_the_cache_is_in_the_models_format() -> None:
    assert worker_config(EngineArgs(kv_cache_dtype="bfloat16")).kv_cache_dtype == "bfloat16"
    with pytest.raises(ConfigError, match="float32"):
        worker_config(EngineArgs(kv_cache_dtype="bfloat16", dtype="float32"))


def test_options_are_checked_first() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        worker_config(EngineArgs(tensor_parallel_size=0))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "uni"),
        ({"tensor_parallel_size": 2}, "mp"),
        ({"pipeline_parallel_size": 3}, "mp"),
        ({"tensor_parallel_size": 2, "ray_address": "auto"}, "ray"),
        ({"ray_address": "auto"}, "uni"),
        ({"distributed_executor_backend": "ray"}, "ray"),
        ({"tensor_parallel_size": 64, "device": "cuda"}, "ray"),  # not so many GPUs here
    ],
)
def test_who_starts_the_workers(changes: dict[str, Any], expected: str) -> None:
    found = worker_config(EngineArgs(**{"device": "cpu", **changes})).parallel
    assert found.backend == expected
    assert found.size == changes.get("tensor_parallel_size", 1) * changes.get(
        "pipeline_parallel_size", 1
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"distributed_executor_backend": "uni"}, "one worker in the engine's process, and 2"),
        ({"device": "cuda:1"}, "need a GPU each"),
    ],
)
def test_workers_that_cannot_be_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        worker_config(EngineArgs(**{"device": "cpu", "tensor_parallel_size": 2, **changes}))
