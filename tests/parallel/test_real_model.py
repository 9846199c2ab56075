"""The real small model over ranks: greedy and seeded answers of one device, in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from octavo.config import ParallelConfig, WorkerConfig
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, TokenParams
from tests.parallel.crews import make_core, new_seed, run_all, thread_ranks, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.model]


def some_requests(seed: int) -> list[AddRequest]:
    """Around block borders, with shared beginnings; a greedy and a drawn answer to each prompt.

    Drawn from the 20 likeliest: after random prompts all 49,152 tokens are about as likely, and a
    draw then falls so near to the border of two that the last bit of a sum decides.
    """
    rnd = random.Random(seed)
    shared = [rnd.randrange(1000, 40_000) for _ in range(40)]
    prompts = [shared[:length] for length in (1, 15, 16, 17, 33)]
    prompts += [[rnd.randrange(1000, 40_000) for _ in range(length)] for length in (16, 100)]
    return [
        AddRequest(
            f"{index}-{temperature}",
            prompt,
            TokenParams(max_tokens=10, temperature=temperature, top_k=20, seed=rnd.getrandbits(60)),
            0.0,
        )
        for index, prompt in enumerate(prompts)
        for temperature in (0.0, 0.8)
    ]


def settings(folder: Path, parallel: ParallelConfig) -> WorkerConfig:
    return WorkerConfig(
        str(folder),
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        num_blocks=60,
        threads=1,
        parallel=parallel,
    )


@pytest.mark.parametrize(("tensor", "pipeline"), [(3, 1), (1, 2), (3, 2)])
def test_ranks_answer_as_one(tensor: int, pipeline: int, smollm2_folder: Path) -> None:
    requests = some_requests(new_seed())
    alone = LocalExecutor(settings(smollm2_folder, ParallelConfig()))
    sizes = {"max_num_batched_tokens": 64}
    expected = run_all(make_core(alone, alone.start(), **sizes), requests)
    parallel = ParallelConfig(tensor, pipeline, "mp")
    with thread_ranks(settings(smollm2_folder, parallel)) as (executor, info):
        found = run_all(make_core(executor, info, **sizes), requests)
    assert tokens_of(found) == tokens_of(expected)
