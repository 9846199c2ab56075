"""Pooled hidden states: in chunks, in batches, after preemption and with prefixes found again."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.config import SchedulerConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, TokenParams, WorkerInfo
from tests.worker.tiny import VOCAB, write_tiny

BLOCK = 4
BUDGET = 24  # tokens of a step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


def start(
    folder: Path, blocks: int, device: str = "cpu", **changes: object
) -> tuple[LocalExecutor, WorkerInfo]:
    settings: dict[str, object] = {
        "model": str(folder),
        "device": device,
        "dtype": "float32",
        "block_size": BLOCK,
        "max_num_seqs": 6,
        "max_num_batched_tokens": BUDGET,
        "num_blocks": blocks,
        "max_model_len": 72,
        "threads": 1,
    }
    if device == "cpu":
        settings |= {"kernels": "reference", "attention_backend": "sdpa"}
    executor = LocalExecutor(WorkerConfig(**(settings | changes)))  # type: ignore[arg-type]
    return executor, executor.start()


def requests_of(rng: random.Random, count: int) -> list[AddRequest]:
    """Texts to pool among answers that take up pages; some prompts begin alike."""
    shared = [rng.randrange(VOCAB) for _ in range(17)]
    made = []
    for number in range(count):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 45))]
        if rng.random() < 0.4:
            prompt = [*shared, *prompt[:20]]
        kind = rng.choice(("last", "mean", ""))
        params = TokenParams(1 if kind else rng.randint(15, 25), temperature=0.0, pooling=kind)
        made.append(AddRequest(str(number), prompt, params, 0.0))
    return made


def serve(
    executor: LocalExecutor, info: WorkerInfo, requests: list[AddRequest], *, depth: int = 1
) -> tuple[dict[str, np.ndarray], int]:
    """The vector of each request that pools, and how often one was put back."""
    config = SchedulerConfig(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=6,
        max_num_batched_tokens=BUDGET,
        depth=depth,
        lookahead=depth - 1,
    )
    core = EngineCore(Scheduler(config), executor)
    for request in requests:
        core.add(request)
    found: dict[str, np.ndarray] = {}
    preemptions = 0
    while core.has_work():
        news = core.step()
        if news is None:
            continue
        preemptions += news.stats.preemptions
        for output in news.outputs:
            assert not output.error
            if output.pooled:
                assert output.id not in found
                found[output.id] = np.frombuffer(output.pooled, np.float32)
    return found, preemptions


def expected(folder: Path, requests: list[AddRequest]) -> dict[str, np.ndarray]:
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype=torch.float32)
    made = {}
    with torch.inference_mode():
        for request in requests:
            hidden = model(torch.tensor([request.prompt_ids])).last_hidden_state[0]
            if kind := request.params.pooling:
                pooled = hidden.mean(0) if kind == "mean" else hidden[-1]
                made[request.id] = pooled.numpy()
    return made


def check(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, vector in wanted.items():
        np.testing.assert_allclose(found[name], vector, rtol=1e-3, atol=1e-4, err_msg=name)


def test_vectors_do_not_depend_on_what_else_runs(folder: Path) -> None:
    rng = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    requests = requests_of(rng, 30)
    found, preemptions = serve(*start(folder, blocks=20), requests)
    assert preemptions > 0, "the cache is too large for this test"
    check(found, expected(folder, requests))


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_on_a_gpu(folder: Path, eager: bool) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    rng = random.Random(seed := random.randrange(2**32))
    print("seed", seed)
    requests = requests_of(rng, 30)
    changes = {"block_size": 16, "enforce_eager": eager}
    found, _ = serve(*start(folder, 20, "cuda", **changes), requests, depth=2)
    check(found, expected(folder, requests))
