"""The whole worker on a GPU, on a small random model, against the CPU and transformers."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from octavo.config import SchedulerConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.executor.local import LocalExecutor
from octavo.types import AddRequest, TokenParams, WorkerInfo
from tests.worker.test_staged import Got, agree
from tests.worker.test_with_core import requests_of
from tests.worker.tiny import VOCAB, write_tiny

SEQUENCES = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


@pytest.fixture(autouse=True)
def _gpu(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")


def start(folder: Path, device: str, **changes: object) -> tuple[LocalExecutor, WorkerInfo]:
    settings: dict[str, object] = {
        "model": str(folder),
        "device": device,
        "dtype": "float32",
        "block_size": 16,
        "max_num_seqs": SEQUENCES,
        "max_num_batched_tokens": 64,
        "num_blocks": 20,
        "threads": 1,
    }
    if device == "cpu":
        settings |= {"kernels": "reference", "attention_backend": "sdpa"}
    executor = LocalExecutor(WorkerConfig(**(settings | changes)))  # type: ignore[arg-type]
    return executor, executor.start()


def serve(
    executor: LocalExecutor, info: WorkerInfo, requests: list[AddRequest], *, depth: int
) -> dict[str, Got]:
    """What each request got."""
    core = EngineCore(
        Scheduler(
            SchedulerConfig(
                num_blocks=info.num_blocks,
                block_size=info.block_size,
                max_model_len=info.max_model_len,
                max_num_seqs=SEQUENCES,
                max_num_batched_tokens=64,
                depth=depth,
                lookahead=depth - 1,
            )
        ),
        executor,
    )
    # Half of them come one by one, each after a step has been laid out without it.
    left = requests[len(requests) // 2 :]
    for request in requests[: len(requests) // 2]:
        core.add(request)
    got = {request.id: Got() for request in requests}
    while left or core.has_work():
        prepared = core.prepare()
        if left and (prepared or not core.has_work()):
            core.add(left.pop())
        news = core.step()
        for output in news.outputs if news is not None else ():
            one = got[output.id]
            one.ids += output.new_ids
            one.logprobs += output.logprobs or []
            one.prompt_logprobs += output.prompt_logprobs or []
            one.reason, one.error = output.reason, output.error
    return got


def greedy(rng: random.Random, count: int) -> list[AddRequest]:
    return [
        AddRequest(
            str(number),
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 60))],
            TokenParams(rng.randint(5, 40), temperature=0.0),
            0.0,
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_rules_logprobs_and_draws_are_those_of_the_cpu(
    folder: Path, seed: int, depth: int, eager: bool
) -> None:
    requests = requests_of(random.Random(seed), 40)
    executor, info = start(folder, "cuda", enforce_eager=eager)
    assert (info.depth, info.lookahead, info.device) == (2, 1, "cuda:0")
    assert any("graphs: none" in note for note in info.notes) == eager
    got = serve(executor, info, requests, depth=depth)
    expected = serve(*start(folder, "cpu"), requests, depth=1)
    for request in requests:
        nearly(got[request.id], expected[request.id])


def nearly(one: Got, two: Got) -> None:
    """As `agree`, but alternatives that are as good as equal may have changed places."""
    assert (one.ids, one.reason, one.error) == (two.ids, two.reason, two.error)
    pairs = [
        *zip(one.logprobs, two.logprobs, strict=True),
        *zip(one.prompt_logprobs, two.prompt_logprobs, strict=True),
    ]
    for a, b in pairs:
        if a is None or b is None:
            assert a is b
            continue
        assert a.values == pytest.approx(b.values, abs=1e-4)
        known = dict(zip(b.ids, b.values, strict=True))
        for token, value in zip(a.ids, a.values, strict=True):
            assert value == pytest.approx(known.get(token, min(b.values)), abs=1e-4)


def test_tokens_are_those_of_transformers(folder: Path, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).cuda()
    requests = greedy(random.Random(seed), 12)
    executor, info = start(folder, "cuda")
    got = serve(executor, info, requests, depth=2)
    for request in requests:
        prompt = torch.tensor([request.prompt_ids]).cuda()
        with torch.inference_mode():
            out = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=request.params.max_tokens,
                do_sample=False,
                eos_token_id=VOCAB + 1,
                pad_token_id=0,
            )
        assert got[request.id].ids == out[0, prompt.shape[1] :].tolist(), request.id


def test_bf16_ahead_gives_the_same_as_in_step(folder: Path, seed: int) -> None:
    """Plans of a lone sequence are the same either way, so even roundings are."""
    executor, info = start(folder, "cuda", dtype="bfloat16")
    for request in greedy(random.Random(seed), 6):
        ahead = serve(executor, info, [request], depth=2)
        in_step = serve(executor, info, [request], depth=1)
        assert ahead == in_step


def test_memory_that_runs_out_fails_a_step_and_no_more(folder: Path, seed: int) -> None:
    executor, info = start(folder, "cuda")
    requests = greedy(random.Random(seed), 8)
    expected = serve(executor, info, requests, depth=2)
    worker = executor._worker
    assert worker is not None
    runner = worker._runner
    assert runner is not None
    chooser, calls = runner._chooser, [0]
    choose = chooser.choose

    def short(*args: object) -> object:
        calls[0] += 1
        if calls[0] in (3, 30):
            torch.empty(2**60, dtype=torch.uint8, device="cuda")
        return choose(*args)  # type: ignore[arg-type]

    chooser.choose = short  # type: ignore[assignment, method-assign]
    got = serve(executor, info, requests, depth=2)
    assert calls[0] > 30
    assert executor.alive()
    for request in requests:
        agree(got[request.id], expected[request.id])
