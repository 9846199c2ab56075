"""The worker's half for devices with their own memory, on a device that shows everything late."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from octavo.attention.sdpa import SdpaAttention
from octavo.config import SchedulerConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.executor.local import LocalExecutor
from octavo.forward import ForwardBatch
from octavo.kernels.slots import REFERENCE
from octavo.types import AddRequest, StepOutputs, TokenParams, WorkerInfo, unpack
from octavo.worker import worker as worker_module
from octavo.worker.graphs import Eager, Graphs, ladder, token_ladder
from octavo.worker.runner import Runner
from octavo.worker.slots import SlotTable
from octavo.worker.staged import Limits, StagedInputs
from octavo.worker.staged_choose import StagedChooser
from octavo.worker.worker import Worker, largest_step, rehearsals
from tests.worker.fakes import VOCAB, FakeAttention, FakeModel, fake_sample, make_cache
from tests.worker.later import LaterDevice
from tests.worker.test_runner import BLOCK_SIZE, BLOCKS, SLOTS, Driver, check, random_sequence
from tests.worker.test_with_core import POISON, Got, requests_of
from tests.worker.test_worker import config_of
from tests.worker.tiny import write_tiny


class FormedAttention(FakeAttention):
    """The fake's plan, in two forms."""

    forms = ("even", "uneven")

    def __init__(self) -> None:
        self.room = 0

    def reserve(self, max_rows: int) -> None:
        self.room = max(self.room, max_rows)

    def choose(self, lens: NDArray[np.int32]) -> str:
        return self.forms[int(lens.max() > 2 * lens.min())]

    def plan(self, batch: ForwardBatch, form: str | None = None) -> object:
        assert batch.num_rows <= self.room or form is None
        return (form, batch.num_rows)


class FormedSdpa(SdpaAttention):
    """Plain torch's attention, which a device that repeats the whole call can "capture"."""

    forms = ("even", "uneven")

    def reserve(self, max_rows: int) -> None:
        pass

    def choose(self, lens: NDArray[np.int32]) -> str:
        return self.forms[int(lens.max() > 2 * lens.min())]

    def plan(self, batch: ForwardBatch, form: str | None = None):  # type: ignore[no-untyped-def]
        return super().plan(batch)


def staged_runner(model: FakeModel, device: LaterDevice, *, graphs: bool) -> Runner:
    kv = make_cache(BLOCKS + 1, BLOCK_SIZE)
    model.scratch = BLOCKS
    limits = Limits(max_tokens=256, max_rows=SLOTS, max_blocks=32, max_length=128, num_slots=SLOTS)
    inputs = StagedInputs(device, REFERENCE, kv, limits)
    slots = SlotTable(num_slots=SLOTS, vocab_size=VOCAB)
    # The driver looks here for what a slot's last token is.
    slots.last_token = inputs.slots.last_token.numpy()  # type: ignore[attr-defined]
    attention = FormedAttention()
    chooser = StagedChooser(fake_sample, device=device, ops=REFERENCE, inputs=inputs, slots=slots)
    forward: Eager | Graphs = Eager(model, attention)  # type: ignore[arg-type]
    if graphs:
        forward = Graphs(
            model,
            attention,
            forward,
            inputs,
            device,
            chooser.draw,
        )
        forward.capture([1, 2, 5, SLOTS], [8, 30])
    return Runner(model=model, forward=forward, slots=slots, inputs=inputs, chooser=chooser)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_gets_its_own_tokens(seed: int, graphs: bool) -> None:
    rng = random.Random(seed)
    model = FakeModel(seed)
    device = LaterDevice()
    sequences = [random_sequence(rng) for _ in range(14)]
    runner = staged_runner(model, device, graphs=graphs)
    Driver(rng, runner, sequences).run()
    for sequence in sequences:
        check(model, sequence)
    assert (device.replayed > 0) == graphs


def executor_of(
    folder: Path, device: LaterDevice, monkeypatch: pytest.MonkeyPatch, **changes: object
) -> tuple[LocalExecutor, WorkerInfo]:
    choose = worker_module.choose

    def choose_formed(*args: object) -> object:
        return replace(choose(*args), attention=FormedSdpa())  # type: ignore[arg-type]

    monkeypatch.setattr(worker_module, "choose", choose_formed)
    settings: dict[str, object] = {"num_blocks": 20, "max_model_len": 64}
    config: WorkerConfig = config_of(
        folder, kernels="reference", dtype="float32", **(settings | changes)
    )
    executor = LocalExecutor(config)
    executor._worker = Worker(config, device)
    return executor, executor._worker.load()


def core_of(executor: LocalExecutor, info: WorkerInfo, depth: int) -> EngineCore:
    config = SchedulerConfig(
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        max_num_seqs=SLOTS,
        max_num_batched_tokens=24,
        depth=depth,
        lookahead=depth - 1,
    )
    return EngineCore(Scheduler(config), executor)


def take(news: StepOutputs | None, got: dict[str, Got]) -> None:
    for output in news.outputs if news is not None else ():
        one = got[output.id]
        one.ids += output.new_ids
        one.logprobs += output.logprobs or []
        one.prompt_logprobs += output.prompt_logprobs or []
        one.reason, one.error = output.reason, output.error


def serve(
    executor: LocalExecutor, info: WorkerInfo, requests: list[AddRequest], *, depth: int
) -> dict[str, Got]:
    core = core_of(executor, info, depth)
    got = {request.id: Got() for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work():
        take(core.step(), got)
    return got


def agree(one: Got, two: Got) -> None:
    """The same, but for the last bits of log-probs: batches are summed in another order."""
    assert (one.ids, one.reason, one.error) == (two.ids, two.reason, two.error)
    pairs = [
        *zip(one.logprobs, two.logprobs, strict=True),
        *zip(one.prompt_logprobs, two.prompt_logprobs, strict=True),
    ]
    for a, b in pairs:
        if a is None or b is None:
            assert a is b
            continue
        assert (a.ids, a.rank) == (b.ids, b.rank)
        assert a.values == pytest.approx(b.values, abs=1e-4)


@pytest.mark.parametrize(("depth", "eager"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("seed", range(3))
def test_ahead_or_not_captured_or_not_gives_what_the_host_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, depth: int, eager: bool
) -> None:
    folder = write_tiny(tmp_path, seed=1)
    device = LaterDevice()
    executor, info = executor_of(folder, device, monkeypatch, enforce_eager=eager)
    assert (info.depth, info.lookahead) == (2, 1)
    assert (device.captured > 0) == (not eager)
    requests = requests_of(random.Random(seed), 14)
    got = serve(executor, info, requests, depth=depth)
    assert (device.replayed > 0) == (not eager)
    host = LocalExecutor(
        config_of(
            folder,
            kernels="reference",
            attention_backend="sdpa",
            dtype="float32",
            num_blocks=20,
            max_model_len=64,
        )
    )
    host_info = host.start()
    assert (host_info.depth, host_info.lookahead) == (1, 0)
    expected = serve(host, host_info, requests, depth=1)
    for request in requests:
        agree(got[request.id], expected[request.id])


@pytest.mark.parametrize("depth", [1, 2])
def test_a_poisoned_request_fails_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    folder = write_tiny(tmp_path, seed=2, poison=POISON)
    executor, info = executor_of(folder, LaterDevice(), monkeypatch)
    requests = [
        AddRequest(r.id, r.prompt_ids, TokenParams(12, temperature=0.0, bad_words=((POISON,),)), 0)
        for r in requests_of(random.Random(5), 10)
    ]
    requests[3].prompt_ids[0] = POISON
    got = serve(executor, info, requests, depth=depth)
    for request in requests:
        assert ("not finite" in got[request.id].error) == (request is requests[3])
    alone = serve(executor, info, [requests[4]], depth=1)
    assert alone[requests[4].id].ids == got[requests[4].id].ids


class Short(LaterDevice):
    """Runs out of memory now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.fail_at: set[int] = set()
        self.copies = 0
        self.trims = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.copies += 1
        if self.copies in self.fail_at:
            raise torch.OutOfMemoryError("no room")
        super().copy(target, source)

    def trim(self) -> None:
        self.trims += 1


def test_a_step_without_memory_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Short()
    executor, info = executor_of(write_tiny(tmp_path, seed=1), device, monkeypatch)
    requests = requests_of(random.Random(9), 12)
    expected = serve(executor, info, requests, depth=2)
    before = device.trims
    device.fail_at = {device.copies + 5, device.copies + 40}
    got = serve(executor, info, requests, depth=2)
    assert device.trims == before + 2
    for request in requests:
        agree(got[request.id], expected[request.id])


def test_steps_laid_out_before_requests_come_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    source = random.Random(seed)
    device = Short()
    executor, info = executor_of(write_tiny(tmp_path, seed=1), device, monkeypatch)
    requests = requests_of(source, 24)
    expected = serve(executor, info, requests, depth=2)
    core, got = core_of(executor, info, 2), {request.id: Got() for request in requests}
    left, used, extended = list(requests), 0, 0
    device.fail_at = {device.copies + 30}
    while left or core.has_work():
        prepared = core.prepare()
        comes = bool(left) and source.random() < 0.3
        if comes:
            core.add(left.pop(0))
        used, extended = used + prepared, extended + (prepared and comes)
        take(core.step(), got)
    assert used > extended > 0
    for request in requests:
        agree(got[request.id], expected[request.id])


def test_the_ladder_holds_every_batch_with_few_idle_rows() -> None:
    for largest in (1, 3, 8, 100, 512, 700):
        sizes = ladder(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for rows in range(1, largest + 1):
            size = min(s for s in sizes if s >= rows)
            assert size - rows <= max(7, rows // 4)


def test_the_largest_step_is_as_large_as_can_be() -> None:
    assert largest_step(4, 100, 50) == [1, 1, 48, 50]
    assert largest_step(2, 100, 50) == [50, 50]
    assert largest_step(8, 4, 50) == [1, 1, 1, 1]
    assert largest_step(1, 100, 30) == [30]


def test_rehearsals_stay_within_limits_and_hold_what_first_requests_do() -> None:
    for rows, tokens, longest in ((256, 8192, 10240), (4, 16, 8), (1, 4, 3), (64, 64, 4096)):
        plans = rehearsals(rows, tokens, longest)
        for plan in plans:
            assert plan.num_rows <= rows
            assert plan.num_tokens <= tokens
            assert max(unpack(plan.lengths)) <= longest
        assert any(plan.admits and plan.block_ids for plan in plans), "new pages and settings"
        assert any(a.params.top_p < 1 for plan in plans for a in plan.admits), "filters"
        lengths = [list(unpack(plan.lengths)) for plan in plans]
        assert [min(tokens, longest, 2048)] in lengths, "a long prompt"
        assert any(len(each) == min(rows, tokens) for each in lengths), "decode rows beside one"


def test_ladders_hold_no_more_than_steps_can() -> None:
    for largest in (40, 64, 100, 512, 600, 5000):
        sizes = token_ladder(largest)
        assert sizes == sorted(set(sizes))
        assert all(size <= largest for size in sizes)
        assert 536 in sizes or largest < 536


class Measured(LaterDevice):
    """Its memory is its own, and the largest step takes a tenth of it."""

    own_memory = True

    def __init__(self) -> None:
        super().__init__()
        self.rehearsed = 0

    def total_memory(self) -> int:
        return 2**30

    def free_memory(self) -> int:
        return 2**30

    def rehearse(self, work: Callable[[], None]) -> None:
        self.rehearsed += 1
        work()

    def peak_of(self, work: Callable[[], None]) -> int:
        work()
        return 2**30 // 10


def test_the_cache_takes_what_the_largest_step_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Measured()
    folder = write_tiny(tmp_path, seed=1)
    executor, info = executor_of(folder, device, monkeypatch, num_blocks=None, memory_fraction=0.8)
    assert device.rehearsed == 1
    per_block = BLOCK_SIZE * 2 * 2 * 2 * 16 * 4
    assert info.num_blocks == (int(0.8 * 2**30) - 2**30 // 10 - 2**29) // per_block
    phases = [phase for phase, _ in info.timings]
    assert phases[-4:] == ["profile", "cache", "warm-up", "graphs"]
    requests = requests_of(random.Random(4), 6)
    got = serve(executor, info, requests, depth=2)
    assert all(one.reason in ("stop", "length") for one in got.values())
