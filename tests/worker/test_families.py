"""Models with experts and latent attention, served by the whole engine: tokens and cache sizes."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, TokenParams
from octavo.worker.worker import Worker
from tests.models.twins import make_twin
from tests.worker.test_with_core import serve
from tests.worker.test_worker import BLOCK_SIZE, config_of


@pytest.mark.parametrize("case", ["qwen3-moe", "deepseek-v2", "deepseek-v3", "gpt-oss"])
def test_tokens_through_the_engine(case: str, tmp_path: Path) -> None:
    """Chunks, shared prefixes, batches, preemption: as transformers generates, token by token."""
    twin = make_twin(case)
    twin.model.save_pretrained(tmp_path)
    executor = LocalExecutor(
        config_of(tmp_path, kernels="reference", dtype="float32", num_blocks=30, max_model_len=96)
    )
    info = executor.start()
    common = twin.prompt(20)
    prompts = [[*common, *twin.prompt(length)] for length in (1, 5, 9)]
    prompts += [twin.prompt(length) for length in (1, 30, 41)]
    params = TokenParams(max_tokens=32, min_tokens=32, temperature=0.0)
    requests = [AddRequest(str(index), prompt, params, 0.0) for index, prompt in enumerate(prompts)]
    got, _ = serve(executor, info, requests, ahead=0)
    for index, prompt in enumerate(prompts):
        assert got[str(index)].ids == twin.greedy(prompt, 32), f"prompt {index}"


def test_memory_for_a_cache_holds_as_many_latents_as_it_should(tmp_path: Path) -> None:
    twin = make_twin("deepseek-v2")
    twin.model.save_pretrained(tmp_path)
    per_token = (24 + 8) * 3 * 4  # rank and rotated dimensions, layers, float32
    info = Worker(
        config_of(
            tmp_path,
            dtype="float32",
            num_blocks=None,
            max_model_len=64,
            kv_cache_memory_bytes=100 * BLOCK_SIZE * per_token + 5,
        )
    ).load()
    assert info.num_blocks == 100


def test_a_backend_without_latents_is_refused_with_the_reason(tmp_path: Path) -> None:
    twin = make_twin("deepseek-v2-lite")
    twin.model.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="no multi-head latent attention"):
        Worker(config_of(tmp_path, attention_backend="sdpa")).load()


@pytest.mark.parametrize("case", ["mixtral", "gpt-oss"])
def test_experts_are_not_quantized_in_silence(case: str, tmp_path: Path) -> None:
    twin = make_twin(case)
    twin.model.save_pretrained(tmp_path)
    config = config_of(tmp_path, dtype="bfloat16", quantization="fp8", max_model_len=96)
    assert "weights: routed experts stay bfloat16" in Worker(config).load().notes


def test_a_start_says_that_long_contexts_change_short_ones(tmp_path: Path) -> None:
    make_twin("phi3-short-partial", sizes={"max_position_embeddings": 512}).model.save_pretrained(
        tmp_path
    )

    def said(longest: int) -> list[str]:
        config = config_of(tmp_path, dtype="float32", num_blocks=200, max_model_len=longest)
        return [note for note in Worker(config).load().notes if note.startswith("rope: ")]

    assert said(256) == []
    assert len(said(300)) == 1
    assert "--max-model-len 256" in said(300)[0]
