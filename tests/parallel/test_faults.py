"""Workers that die, hang or fail: found soon, told with the rank, and nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from octavo.config import ParallelConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError, EngineDead
from octavo.executor.records import Pulse
from octavo.executor.remote import Patience, RemoteExecutor, moved
from octavo.executor.spawn import PROGRAM, LocalCrew
from octavo.types import AddRequest, StepPlan, TokenParams
from octavo.worker.runner import StepHandle
from octavo.worker.worker import Worker
from tests.parallel.crews import make_core, run_all, thread_ranks, tokens_of
from tests.worker.test_worker import config_of
from tests.worker.tiny import write_tiny

QUICK = Patience(silence=2.0, stuck=3.0, settle=1.0, leave=2.0)
TOLD_SECONDS = 5.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"), seed=1)


def spread(tiny: Path, tensor: int = 2, pipeline: int = 1) -> WorkerConfig:
    return config_of(
        tiny,
        kernels="reference",
        dtype="float32",
        parallel=ParallelConfig(tensor, pipeline, "mp"),
    )


@contextmanager
def processes(config: WorkerConfig, *program: str) -> Iterator[tuple[EngineCore, LocalCrew]]:
    """A core over real processes; afterwards nothing of them is left."""
    crew = LocalCrew(config.parallel, program=program or PROGRAM)
    folder = Path(crew.places()[0].store.removeprefix("file:")).parent
    executor = RemoteExecutor(config, crew, parent=os.getpid(), patience=QUICK)
    info = executor.start()
    pids = crew.pids
    assert len(pids) == config.parallel.size
    try:
        yield make_core(executor, info), crew
    finally:
        executor.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not folder.exists()


def faulty(kind: str, step: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "tests.parallel.faulty_rank", kind, str(step))


def request(name: str, first: int = 5, count: int = 40) -> AddRequest:
    return AddRequest(name, [first, 6, 7], TokenParams(max_tokens=count, temperature=0.0), 0.0)


def run_until_dead(core: EngineCore) -> EngineDead:
    while True:
        try:
            core.step()
        except EngineDead as error:
            return error


def check_until_dead(core: EngineCore) -> None:
    while True:
        try:
            core.check()
        except EngineDead:
            return
        time.sleep(0.05)


def test_a_worker_that_is_killed_in_a_step(tiny: Path) -> None:
    with processes(spread(tiny)) as (core, crew):
        run_all(core, [request("a", count=8)])
        core.check()
        core.add(request("b"))
        core.step()
        os.kill(crew.pids[1], signal.SIGKILL)
        began = time.monotonic()
        error = str(run_until_dead(core))
        assert time.monotonic() - began < TOLD_SECONDS
        assert "rank 1" in error
        assert "SIGKILL" in error


@pytest.mark.slow
def test_a_worker_that_is_killed_while_there_is_nothing_to_do(tiny: Path) -> None:
    """The same news in a step after it; and a start after that works as before."""
    with processes(spread(tiny)) as (core, crew):
        expected = tokens_of(run_all(core, [request("a", count=8)]))
        os.kill(crew.pids[1], signal.SIGKILL)
        began = time.monotonic()
        check_until_dead(core)
        assert time.monotonic() - began < TOLD_SECONDS
        core.add(request("b"))
        error = str(run_until_dead(core))
        assert "rank 1" in error
        assert "SIGKILL" in error
    with processes(spread(tiny)) as (core, crew):
        assert tokens_of(run_all(core, [request("a", count=8)])) == expected
        os.kill(crew.pids[0], signal.SIGSTOP)  # hangs as a whole
        core.add(request("c"))
        began = time.monotonic()
        assert "rank 0 has given no sign of life" in str(run_until_dead(core))
        assert time.monotonic() - began < QUICK.silence + TOLD_SECONDS


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        pytest.param("exit", "rank 1 .* ended with code 7", marks=pytest.mark.slow),
        pytest.param("hang", "not reached by rank 1", marks=pytest.mark.slow),
        pytest.param("raise", "rank 1: RuntimeError: a fault", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_leaves_the_others_in_a_collective(kind: str, words: str, tiny: Path) -> None:
    with processes(spread(tiny), *faulty(kind, 4)) as (core, _):
        core.add(request("a"))
        began = time.monotonic()
        assert re.search(words, str(run_until_dead(core)))
        assert time.monotonic() - began < QUICK.stuck + TOLD_SECONDS


def test_a_step_that_fails_on_all_ranks_costs_the_guilty_request_alone(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that raise alike stay in step with each other, with several steps in flight too."""
    with thread_ranks(spread(tiny, 1, 2)) as (executor, info):
        requests = [request(str(index), index + 3, 12) for index in range(4)]
        expected = tokens_of(run_all(make_core(executor, info), requests))
    submit = Worker.submit

    def failing(self: Worker, plan: StepPlan) -> StepHandle:
        handle = submit(self, plan)  # its collectives, so that nobody waits for another
        if 91 in memoryview(plan.tokens).cast("i").tolist():
            raise RuntimeError("a poisoned token")
        return handle

    monkeypatch.setattr(Worker, "submit", failing)
    with thread_ranks(spread(tiny, 1, 2), patience=QUICK) as (executor, info):
        core = make_core(executor, info)
        news = run_all(core, [*requests, request("guilty", 91)])
        assert executor.alive()
    assert news["guilty"][-1].reason == "error"
    assert "a poisoned token" in news["guilty"][-1].error
    found = tokens_of(news)
    del found["guilty"]
    assert all(found[name][:5] == tokens[:5] or 91 in tokens for name, tokens in expected.items())


def test_a_model_that_cannot_be_divided_is_refused_with_what_can(tiny: Path) -> None:
    config = spread(tiny, 3)
    why = r"4 attention heads are no multiple.*1, 2, 4"
    with pytest.raises(ConfigError, match=why), thread_ranks(config):
        pass
    with pytest.raises(ConfigError, match="2 layers"), thread_ranks(spread(tiny, 1, 3)):
        pass


def test_ports_between_machines_are_bound_to_one_interface_and_encrypted(tiny: Path) -> None:
    """Plain sockets that connect and speak are not heard, and harm nothing."""
    import socket as plain

    import zmq

    with thread_ranks(spread(tiny), host="127.0.0.1") as (executor, info):
        context = zmq.Context()
        rogue = context.socket(zmq.PUSH)
        rogue.linger = 0
        address = executor._results.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0")
        assert address.startswith("tcp://127.0.0.1:")
        rogue.connect(address)
        rogue.send(b"\x80\x04.", zmq.NOBLOCK)
        host, port = address.removeprefix("tcp://").split(":")
        with plain.create_connection((host, int(port))) as raw:
            raw.sendall(os.urandom(512))
        time.sleep(0.3)
        news = run_all(make_core(executor, info), [request("a", count=4)])
        assert len(tokens_of(news)["a"]) == 4
        rogue.close()
        context.term()


def test_a_long_computation_is_not_a_hang(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    submit = Worker.submit

    def slow(self: Worker, plan: StepPlan) -> StepHandle:
        end = time.process_time() + (1.5 if plan.step == 2 else 0.0)
        while time.process_time() < end:
            sum(range(1000))
        return submit(self, plan)

    monkeypatch.setattr(Worker, "submit", slow)
    with thread_ranks(spread(tiny, 1, 2), patience=Patience(stuck=0.5)) as (executor, info):
        news = run_all(make_core(executor, info), [request("a", count=6)])
    assert len(tokens_of(news)["a"]) == 6


def test_movement_is_told_from_waiting() -> None:
    pulse = Pulse(0, 5, True, 40, "all_reduce", 3.0)
    assert moved(pulse, replace(pulse, calls=41))
    assert moved(pulse, replace(pulse, steps=6))
    assert moved(pulse, replace(pulse, worked=3.4))
    assert not moved(pulse, pulse)
    assert not moved(pulse, replace(pulse, worked=0.0))  # it has entered a collective
    assert not moved(replace(pulse, worked=0.0), replace(pulse, worked=0.0))


def test_a_slow_start_is_not_a_hang(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Worker.load
    done = threading.Event()

    def slow(self: Worker, report: object = None) -> object:
        time.sleep(1.0)
        done.set()
        return load(self, report)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "load", slow)
    patience = Patience(silence=0.4, stuck=0.4)
    with thread_ranks(spread(tiny), patience=patience) as (executor, _):
        assert executor.alive()
        assert done.is_set()


def test_workers_that_cannot_be_started_leave_nothing(tiny: Path) -> None:
    config = spread(tiny)
    crew = LocalCrew(config.parallel, program=("/no/such/program",))
    folder = Path(crew.places()[0].store.removeprefix("file:")).parent
    executor = RemoteExecutor(config, crew)
    with pytest.raises(FileNotFoundError):
        executor.start()
    executor.close()  # again
    assert not folder.exists()
    assert not executor.alive()
