"""Workers as threads of this process, over real sockets and real collectives; and a core for them.

What starts in a tenth of a second here takes seconds as processes. Those are in `test_faults.py`.
"""

from __future__ import annotations

import contextlib
import secrets
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from octavo.config import ParallelConfig, Place, SchedulerConfig, WorkerConfig
from octavo.engine.core import EngineCore
from octavo.engine.scheduler import Scheduler
from octavo.executor.base import Executor
from octavo.executor.channel import Binder, Context
from octavo.executor.records import RankSettings
from octavo.executor.remote import Patience, RemoteExecutor
from octavo.executor.serving import serve
from octavo.executor.spawn import LOOPBACK, places
from octavo.types import AddRequest, SequenceOutput, WorkerInfo

NAMES = ("id", "new_ids", "reason", "logprobs", "prompt_logprobs")


class ThreadCrew:
    """A thread for each rank."""

    def __init__(self, parallel: ParallelConfig, host: str = "") -> None:
        """With a `host` sockets are encrypted ports there, else they are in a folder."""
        self._parallel = parallel
        self._host = host
        self._folder = tempfile.TemporaryDirectory(prefix="octavo-")
        self._threads: list[threading.Thread] = []

    def binder(self, context: Context) -> Binder:
        if self._host:
            return Binder(context, host=self._host)
        return Binder(context, folder=Path(self._folder.name))

    def places(self) -> list[Place]:
        store = f"file:{self._folder.name}/ranks"
        return places(self._parallel, store, [LOOPBACK] * self._parallel.size)

    def start(self, settings: Sequence[RankSettings]) -> None:
        for one in settings:
            thread = threading.Thread(target=serve, args=(one,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def lost(self) -> str:
        dead = [rank for rank, thread in enumerate(self._threads) if not thread.is_alive()]
        return f"worker rank {dead[0]} ended" if dead else ""

    def dump_stacks(self) -> None:
        pass

    def close(self, patience: float) -> None:
        for thread in self._threads:
            thread.join(10 * patience)
        self._folder.cleanup()


@contextlib.contextmanager
def thread_ranks(
    config: WorkerConfig, host: str = "", patience: Patience | None = None
) -> Iterator[tuple[RemoteExecutor, WorkerInfo]]:
    """An executor over threads, started; closed when the block is left."""
    crew = ThreadCrew(config.parallel, host)
    executor = RemoteExecutor(config, crew, patience=patience)
    info = executor.start()
    try:
        yield executor, info
    finally:
        executor.close()


def make_core(executor: Executor, info: WorkerInfo, **changes: object) -> EngineCore:
    settings: dict[str, object] = {
        "num_blocks": info.num_blocks,
        "block_size": info.block_size,
        "max_model_len": info.max_model_len,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 24,
        "depth": info.depth,
        "lookahead": info.lookahead,
    }
    return EngineCore(Scheduler(SchedulerConfig(**{**settings, **changes})), executor)  # type: ignore[arg-type]


def run_all(core: EngineCore, requests: list[AddRequest]) -> dict[str, list[SequenceOutput]]:
    """Runs all to their ends; the news of each."""
    for request in requests:
        core.add(request)
    news: dict[str, list[SequenceOutput]] = {request.id: [] for request in requests}
    while core.has_work():
        outputs = core.step()
        for output in outputs.outputs if outputs is not None else ():
            news[output.id].append(output)
    return news


def tokens_of(news: dict[str, list[SequenceOutput]]) -> dict[str, list[int]]:
    return {id: [token for one in outputs for token in one.new_ids] for id, outputs in news.items()}


def new_seed() -> int:
    seed = secrets.randbits(31)
    print(f"seed {seed}")
    return seed
