"""Scheduler, core, executor and worker together: each request gets what it would get alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from octavo.config import SchedulerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.errors import ConfigError
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, TokenLogprobs, TokenParams, WorkerInfo
from tests.worker.test_runner import SLOTS, random_sequence
from tests.worker.test_worker import config_of
from tests.worker.tiny import write_tiny

POISON = 95
BLOCKS = 20  # too few for all at once: some are preempted


@dataclass
class Got:
    """What came back for one request."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    reason: str | None = None
    error: str = ""


def start(folder: Path) -> tuple[LocalExecutor, WorkerInfo]:
    executor = LocalExecutor(
        config_of(folder, kernels="native", num_blocks=BLOCKS, max_model_len=64)
    )
    try:
        return executor, executor.start()
    except ConfigError as error:
        pytest.skip(f"no native kernels here: {error}")


def serve(
    executor: LocalExecutor, info: WorkerInfo, requests: list[AddRequest], *, ahead: int
) -> tuple[dict[str, Got], int]:
    """Runs all requests in a new core; what each got, and the number of preemptions."""
    core = EngineCore(
        Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                max_num_seqs=SLOTS,
                max_num_batched_tokens=24,
                depth=1 + ahead,
                lookahead=ahead,
            )
        ),
        executor,
    )
    for request in requests:
        core.add(request)
    got = {request.id: Got() for request in requests}
    preemptions = 0
    while core.has_work():
        news = core.step()
        if news is None:
            continue
        preemptions += news.stats.preemptions
        for output in news.outputs:
            one = got[output.id]
            one.ids += output.new_ids
            one.logprobs += output.logprobs or []
            one.prompt_logprobs += output.prompt_logprobs or []
            assert one.reason is None
            one.reason, one.error = output.reason, output.error
    return got, preemptions


def requests_of(rng: random.Random, count: int) -> list[AddRequest]:
    """Some begin alike, so that cached pages are met."""
    common = [rng.randrange(29) for _ in range(12)]
    requests = []
    for number in range(count):
        live = random_sequence(rng)
        prompt = [*common, *live.prompt] if rng.random() < 0.5 else live.prompt
        params = replace(live.params, max_tokens=rng.randint(10, 25))
        requests.append(AddRequest(str(number), prompt, params, 0.0))
    return requests


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(4))
def test_each_gets_what_it_would_get_alone(tmp_path: Path, seed: int, ahead: int) -> None:
    executor, info = start(write_tiny(tmp_path, seed=1))
    rng = random.Random(seed)
    requests = requests_of(rng, 16)
    together, preemptions = serve(executor, info, requests, ahead=ahead)
    assert preemptions > 0, "the pool is too large for this test to mean anything"
    for request in requests:
        alone, _ = serve(executor, info, [request], ahead=0)
        assert together[request.id] == alone[request.id], f"seed {seed} request {request.id}"
        assert alone[request.id].reason in ("stop", "length")


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_a_poisoned_request_fails_alone(tmp_path: Path, seed: int, ahead: int) -> None:
    executor, info = start(write_tiny(tmp_path, seed=2, poison=POISON))
    rng = random.Random(seed)
    requests = [
        AddRequest(
            request.id,
            request.prompt_ids,
            TokenParams(
                max_tokens=request.params.max_tokens,
                temperature=request.params.temperature,
                seed=request.params.seed,
                bad_words=((POISON,),),
            ),
            0.0,
        )
        for request in requests_of(rng, 12)
    ]
    poisoned = {"3", "7"}
    for request in requests:
        if request.id in poisoned:
            request.prompt_ids[rng.randrange(len(request.prompt_ids))] = POISON
    together, _ = serve(executor, info, requests, ahead=ahead)
    for request in requests:
        got = together[request.id]
        if request.id in poisoned:
            assert (got.reason, got.ids) == ("error", [])
            assert "not finite" in got.error
        else:
            alone, _ = serve(executor, info, [request], ahead=0)
            assert got == alone[request.id], f"seed {seed} request {request.id}"
