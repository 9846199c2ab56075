"""The program of the engine-core process: builds worker, scheduler and core, then serves.

Started by `supervisor.py` as `python -m octavo.core`; its settings come over standard input so that
none of them stands on a command line. Torch is imported in here and never in the API process, and
at once: before settings come, while the server opens the model's files.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from dataclasses import dataclass, replace

import msgspec

from octavo.config import SchedulerConfig, WorkerConfig
from octavo.engine.channel import Addresses
from octavo.engine.core import EngineCore
from octavo.engine.process import Report, run
from octavo.engine.scheduler import Scheduler
from octavo.engine.trace import Tracer
from octavo.errors import OctavoError
from octavo.types import WorkerInfo


@dataclass(frozen=True, slots=True)
class CoreSettings:
    """All that a core's process is told. Sizes in `scheduler` that the worker finds are zero."""

    addresses: tuple[Addresses, ...]  # of its clients; the first is the server's own
    parent: int  # process id of the server
    worker: WorkerConfig
    scheduler: SchedulerConfig


def build_core(
    worker: WorkerConfig, scheduler: SchedulerConfig, report: Report
) -> tuple[EngineCore, WorkerInfo]:
    """Starts a worker in this process and puts scheduler and core before it."""
    from octavo.executor.local import LocalExecutor

    executor = LocalExecutor(worker, report=report)
    info = executor.start()
    # What does not fit has been refused by the worker; see `worker/memory.py`.
    sized = replace(
        scheduler,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        max_model_len=info.max_model_len,
        depth=info.depth,
        lookahead=info.lookahead,
    )
    tracer = Tracer() if scheduler.trace else None
    return EngineCore(Scheduler(sized, tracer), executor), info


def _import_worker() -> None:
    """What is wrong with it is told when it is imported again."""
    with contextlib.suppress(Exception):
        from octavo.executor.local import import_worker

        import_worker()


def main() -> int:
    """Reads the settings, serves until told to stop, and gives the exit code."""
    # Ctrl-C and service managers signal every process of a group; the API process drains first
    # and then says stop. Should it die instead, the heartbeat notices and ends this process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_import_worker, name="import", daemon=True).start()
    told = sys.stdin.buffer.read()
    if not told:
        return 1  # the server could not open the model, and has said so
    settings = msgspec.json.decode(told, type=CoreSettings)
    try:
        return run(
            settings.addresses,
            settings.parent,
            lambda report: build_core(settings.worker, settings.scheduler, report),
        )
    except OctavoError:
        return 1  # the client has been told, and tells the operator


if __name__ == "__main__":
    sys.exit(main())
