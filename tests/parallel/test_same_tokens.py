"""Several ranks give the tokens of one: tensors cut, stages in a row, and both."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from octavo.config import ParallelConfig
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, SequenceOutput, TokenParams
from tests.models.twins import Twin, make_twin
from tests.parallel.crews import make_core, new_seed, run_all, thread_ranks, tokens_of
from tests.worker.test_worker import config_of

LENGTH = 96
# family, tensor, pipeline
CELLS = [
    ("llama", 2, 1),
    ("llama-biases", 1, 3),
    ("gemma3", 2, 2),
    ("qwen3-moe", 1, 2),
    ("deepseek-v2", 2, 1),
]
MORE = [
    ("llama-one-kv-head", 4, 1),
    ("qwen3-biases-window", 2, 2),
    ("phi3", 2, 1),
    ("gpt-oss", 2, 1),
    ("gpt-oss", 1, 2),
    ("qwen2-moe", 2, 1),
    ("glm4", 1, 2),
    ("gpt-oss", 2, 2),
    ("mixtral", 2, 2),
    ("deepseek-v3", 2, 2),
]


def some_requests(twin: Twin, seed: int) -> list[AddRequest]:
    """Greedy and drawn, with rules, log-probs, shared beginnings, and prompts of many chunks."""
    rnd = random.Random(seed)
    common = twin.prompt(20)
    requests: list[AddRequest] = []
    for index in range(6):
        length = rnd.choice((1, 7, 30, 50))
        prompt = [*common, *twin.prompt(length)] if index % 2 else twin.prompt(length)
        params = TokenParams(
            max_tokens=8,
            temperature=rnd.choice((0.0, 0.8)),
            top_k=rnd.choice((0, 20)),
            seed=rnd.getrandbits(60),
            presence_penalty=rnd.choice((0.0, 1.5)),
            logprobs=rnd.choice((None, 3)),
            prompt_logprobs=rnd.choice((None, None, 2)),
        )
        requests.append(AddRequest(str(index), prompt, params, 0.0))
    return requests


@pytest.mark.parametrize(
    ("case", "tensor", "pipeline"),
    [*CELLS, *(pytest.param(*cell, marks=pytest.mark.slow) for cell in MORE)],
)
def test_ranks_give_the_tokens_of_one(
    case: str, tensor: int, pipeline: int, tmp_path: Path
) -> None:
    twin = make_twin(case)
    twin.model.save_pretrained(tmp_path)
    requests = some_requests(twin, new_seed())
    config = config_of(
        tmp_path, kernels="reference", dtype="float32", num_blocks=30, max_model_len=LENGTH
    )
    alone = LocalExecutor(config)
    expected = run_all(make_core(alone, alone.start()), requests)
    spread = config_of(
        tmp_path,
        kernels="reference",
        dtype="float32",
        num_blocks=30,
        max_model_len=LENGTH,
        parallel=ParallelConfig(tensor, pipeline, "mp"),
    )
    with thread_ranks(spread) as (executor, info):
        assert info.depth == pipeline
        found = run_all(make_core(executor, info), requests)
    assert tokens_of(found) == tokens_of(expected)
    for id, outputs in found.items():
        assert_close(outputs, expected[id])


def assert_close(found: list[SequenceOutput], expected: list[SequenceOutput]) -> None:
    """The same log-probs, and ends."""
    assert found[-1].reason == expected[-1].reason
    for field in ("logprobs", "prompt_logprobs"):
        ours = [one for output in found for one in getattr(output, field) or ()]
        theirs = [one for output in expected for one in getattr(output, field) or ()]
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            if one is None or other is None:
                assert one is other
                continue
            assert one.ids == other.ids
            for value, wanted in zip(one.values, other.values, strict=True):
                assert math.isclose(value, wanted, rel_tol=1e-4, abs_tol=1e-4)


def test_several_steps_are_in_flight(tmp_path: Path) -> None:
    """With two stages each decode step takes half of the sequences, so that both have work."""
    twin = make_twin("llama")
    twin.model.save_pretrained(tmp_path)
    config = config_of(
        tmp_path,
        kernels="reference",
        dtype="float32",
        num_blocks=40,
        max_model_len=LENGTH,
        parallel=ParallelConfig(1, 2, "mp"),
    )
    with thread_ranks(config) as (executor, info):
        core = make_core(executor, info, max_num_batched_tokens=64)
        for index in range(4):
            core.add(AddRequest(str(index), twin.prompt(5), TokenParams(max_tokens=20), 0.0))
        most = 0
        while core.has_work():
            core.step()
            most = max(most, 1 + int(core.control("snapshot", {})["in_flight"]))
    assert most == 2
